"""The process of a `Watchdog`: waits for its launcher's goodbye, and clears up if there is none.

It runs alone, without the packages and without most of the standard library. There is one for every
job, nearly all of them do nothing but wait, and to import what clearing up takes costs more than
all else that they do. So that is imported when it is needed.
"""

from __future__ import annotations

import os
import select
import signal
import sys

GOODBYE = b"goodbye\n"
_CLEAR_UP_SECONDS = 20.0  # how long killing goes on: a process may start others meanwhile
_POLL_SECONDS = 0.02
# They remove shared memory and semaphores when the processes that used them have ended.
_CLEANERS = (b"multiprocessing.resource_tracker", b"torch_shm_manager")
_CLEANERS_SECONDS = 1.0


def _main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    said = _listen(int(sys.argv[1]))
    orders, newline, rest = said.partition(b"\n")
    if newline and rest != GOODBYE:
        _clear_up(orders)
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
    process = _opened(launcher)
    if process is not None:
        poller.register(process, select.POLLIN)
    while os.getppid() == launcher:  # else the number may be another process's by now
        gone = any(descriptor != 0 for descriptor, _ in poller.poll())
        found, ended = _read()
        said += found
        if gone or ended or said.endswith(b"\n" + GOODBYE):
            return said
    return said + _read()[0]


def _opened(process: int) -> int | None:
    try:
        return os.pidfd_open(process)
    except (OSError, AttributeError):
        return None


def _read() -> tuple[bytes, bool]:
    """What is in the pipe now, and whether it was closed."""
    said = b""
    try:
        while found := os.read(0, 2**16):
            said += found
    except BlockingIOError:
        return said, False
    return said, True


def _clear_up(text: bytes) -> None:
    import contextlib
    import json
    import shutil
    import subprocess

    orders = json.loads(text)
    if orders["variables"]:
        _kill_all({os.fsencode(f"{name}={value}") for name, value in orders["variables"].items()})
    for folder in orders["folders"]:
        shutil.rmtree(folder, ignore_errors=True)
    if orders["command"]:
        with contextlib.suppress(OSError):
            subprocess.run(orders["command"], cwd=orders["cwd"], stdin=subprocess.DEVNULL)


def _kill_all(wanted: set[bytes]) -> None:
    """All processes that have these variables. One that has ended has no variables any more."""
    import contextlib
    import time
    from pathlib import Path

    begin = now = time.monotonic()
    left = True
    while left and now - begin < _CLEAR_UP_SECONDS:
        left = False
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError, ValueError):  # ended meanwhile, or another user's
                if not wanted.issubset((process / "environ").read_bytes().split(b"\0")):
                    continue
                left = True
                command = (process / "cmdline").read_bytes()
                is_cleaner = any(name in command for name in _CLEANERS)
                if not is_cleaner or now - begin > _CLEANERS_SECONDS:
                    os.kill(int(process.name), signal.SIGKILL)
        time.sleep(_POLL_SECONDS)
        now = time.monotonic()


if __name__ == "__main__":
    _main()
