"""A small process that clears up after a launcher that was killed outright.

    launcher                                watchdog
    ┌──────────┐  orders, then a goodbye    ┌─────────────────────────────┐
    │ Watchdog │ ─────────────────────────▶ │ waits for one or the other: │
    └──────────┘  a pipe, and its own end   └─────────────────────────────┘
                                              a goodbye: nothing is left to do
                                              no goodbye, and the launcher is gone: clear up

The kernel ends the launcher's own children with it (`orphans`). It does not know their children,
such as data-loading workers and shells, nor folders and network namespaces. Those are in the
orders: variables by which processes are found, folders to remove, a command to run.

The process has a session of its own, so that no Ctrl-C reaches it, holds none of the launcher's
streams, and runs this file alone, without the packages: it is started for every job. Where it is
killed too, `owned_folders` and `testing.namespaces` find what is left when the next job starts.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

_GOODBYE = b"goodbye\n"
_CLEAR_UP_SECONDS = 20.0  # how long killing goes on: a process may start others meanwhile
_END_SECONDS = 30.0  # how long the launcher waits for the watchdog's own end
_KILLED_SECONDS = 5.0
_POLL_SECONDS = 0.02
# They remove shared memory and semaphores when the processes that used them have ended.
_CLEANERS = (b"multiprocessing.resource_tracker", b"torch_shm_manager")
_CLEANERS_SECONDS = 1.0


class Watchdog:
    """The launcher's side. Where no watchdog can be started, the job goes on without one.

    `variables`: every process that has all of them is killed. `folders` are removed after that, and
    then `command` is run, if there is one. All of this only if the launcher goes without `close`.
    """

    def __init__(
        self,
        *,
        variables: Mapping[str, str] | None = None,
        folders: Iterable[Path] = (),
        command: Sequence[str] = (),
    ) -> None:
        orders = {
            "variables": dict(variables or {}),
            "folders": [str(folder.absolute()) for folder in folders],
            "command": list(command),
            "cwd": str(Path.cwd()),
        }
        self._process = _start(orders)
        # Without `close`, as after an exception: the end of the pipe makes the watchdog clear up.
        self._end = weakref.finalize(self, _end, self._process, os.getpid())

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def close(self) -> None:
        """The launcher has cleared up itself."""
        process = self._process
        if process is not None and process.stdin is not None and self._end.alive:
            with contextlib.suppress(OSError):  # it has been killed
                process.stdin.write(_GOODBYE)
        self._end()


def _start(orders: Mapping[str, Any]) -> subprocess.Popen[bytes] | None:
    from farandole.environment import JOB  # not at the top: the process itself has no packages

    if not sys.platform.startswith("linux"):  # it looks for processes in /proc
        return None
    try:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, str(os.getpid())],
            # It is no part of a job that this launcher may be a worker of, and outlives that.
            env={name: value for name, value in os.environ.items() if name != JOB},
            cwd="/",
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            bufsize=0,
        )
        assert process.stdin is not None
        process.stdin.write(json.dumps(orders).encode() + b"\n")
    except OSError:
        return None
    return process


def _end(process: subprocess.Popen[bytes] | None, owner: int) -> None:
    if process is None or os.getpid() != owner:  # a forked child has a copy of everything
        return
    assert process.stdin is not None
    process.stdin.close()
    try:
        process.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # the system itself holds it (state D)
            process.wait(_KILLED_SECONDS)


# The process


def _main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    said = _listen(int(sys.argv[1]))
    orders, newline, rest = said.partition(b"\n")
    if newline and rest != _GOODBYE:
        _clear_up(json.loads(orders))
    os._exit(0)


def _listen(launcher: int) -> bytes:
    """All that the launcher has said, when it says no more: it has closed the pipe, or is gone.

    A zombie is gone too: its descriptors are closed. A child that it forked may hold a copy of the
    pipe, so its process itself is looked at as well, where the kernel can (since 5.3).
    """
    said = b""
    os.set_blocking(0, False)
    poller = select.poll()
    poller.register(0, select.POLLIN)
    with contextlib.suppress(OSError, AttributeError):
        poller.register(os.pidfd_open(launcher), select.POLLIN)
    while os.getppid() == launcher:  # else the number may be another process's by now
        gone = any(descriptor != 0 for descriptor, _ in poller.poll())
        with contextlib.suppress(BlockingIOError):
            while found := os.read(0, 2**16):
                said += found
            gone = True
        if gone or said.endswith(b"\n" + _GOODBYE):
            return said
    with contextlib.suppress(BlockingIOError):
        while found := os.read(0, 2**16):
            said += found
    return said


def _clear_up(orders: Mapping[str, Any]) -> None:
    if orders["variables"]:
        _kill_all(orders["variables"])
    for folder in orders["folders"]:
        shutil.rmtree(folder, ignore_errors=True)
    if orders["command"]:
        with contextlib.suppress(OSError):
            subprocess.run(orders["command"], cwd=orders["cwd"], stdin=subprocess.DEVNULL)


def _kill_all(variables: Mapping[str, str]) -> None:
    wanted = {os.fsencode(f"{name}={value}") for name, value in variables.items()}
    begin = time.monotonic()
    while (left := _find(wanted)) and time.monotonic() - begin < _CLEAR_UP_SECONDS:
        late = time.monotonic() - begin > _CLEANERS_SECONDS
        for process in left:
            with contextlib.suppress(OSError, ValueError):
                if late or not _is_cleaner(process):
                    os.kill(int(process.name), signal.SIGKILL)
        time.sleep(_POLL_SECONDS)


def _find(wanted: set[bytes]) -> list[Path]:
    """The processes, as folders of /proc. One that has ended has no variables any more."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # ended meanwhile, or another user's
            if wanted.issubset((process / "environ").read_bytes().split(b"\0")):
                found.append(process)
    return found


def _is_cleaner(process: Path) -> bool:
    command = (process / "cmdline").read_bytes()
    return any(name in command for name in _CLEANERS)


if __name__ == "__main__":
    _main()
