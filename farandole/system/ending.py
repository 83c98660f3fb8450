"""Ends a process that leads a session of its own: asks first, then kills it with its children."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from typing import Protocol

_KILLED_SECONDS = 5.0


class Process(Protocol):
    """As a `Popen` is, as far as needed."""

    @property
    def pid(self) -> int: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def send_signal(self, number: int, /) -> None: ...


def end_process(process: Process, seconds: float) -> None:
    """It has so many seconds after SIGTERM. Waits for its end."""
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        kill_process(process)


def kill_process(process: Process) -> None:
    """At once, with its session. The workers of a launcher that is killed end by themselves."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):  # the system itself holds it (state D)
        process.wait(_KILLED_SECONDS)
