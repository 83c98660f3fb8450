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

The process has a session of its own, so that no Ctrl-C reaches it, and holds none of the launcher's
streams. It is started for every job, so it runs one small file alone (`watchdog_process`). Where it
is killed too, `owned_folders` and `testing.namespaces` find what is left when the next job starts.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import weakref
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from farandole.environment import JOB
from farandole.system.watchdog_process import GOODBYE

_PROCESS = str(Path(__file__).with_name("watchdog_process.py"))
_END_SECONDS = 30.0  # how long the launcher waits for the watchdog's own end
_KILLED_SECONDS = 5.0


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
                process.stdin.write(GOODBYE)
        self._end()


def _start(orders: Mapping[str, Any]) -> subprocess.Popen[bytes] | None:
    if not sys.platform.startswith("linux"):  # it looks for processes in /proc
        return None
    try:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", _PROCESS, str(os.getpid())],
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
