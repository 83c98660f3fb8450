"""What the system says of a process of this host: whether it is stopped, and what it listens to.

A stopped process (SIGSTOP, state T) runs nothing: it does not answer its peers, it does not react
to SIGTERM, and it cannot print its stack. One that a debugger holds for a moment is not meant.
"""

from __future__ import annotations

import signal
from pathlib import Path

import psutil


def is_stopped(pid: int) -> bool:
    """Whether SIGSTOP, or another signal of job control, has stopped this process."""
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    except psutil.Error:  # it has ended meanwhile
        return False


def handles(pid: int, number: signal.Signals) -> bool:
    """Whether this process has a handler for a signal; False where the system does not tell."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return False
    caught = next((line.split()[1] for line in lines if line.startswith("SigCgt:")), "0")
    return bool(int(caught, 16) >> (number - 1) & 1)
