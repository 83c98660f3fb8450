"""A child that ends when its parent does, even if the parent is killed outright (Linux only)."""

from __future__ import annotations

import ctypes
import signal
import sys
from collections.abc import Mapping

import psutil

LAUNCHER = "FARANDOLE_LAUNCHER"
"""The variable that tells a worker its launcher's process id."""


def end_with_parent() -> None:
    """Asks the kernel to kill this process when its parent dies."""
    if sys.platform.startswith("linux"):
        set_parent_death_signal = 1  # PR_SET_PDEATHSIG, <sys/prctl.h>
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)


def adopt_orphans() -> bool:
    """Makes this process the parent of its descendants whose parent has ended; False: it cannot."""
    if not sys.platform.startswith("linux"):
        return False
    set_child_subreaper = 36  # PR_SET_CHILD_SUBREAPER
    return bool(ctypes.CDLL(None).prctl(set_child_subreaper, 1, 0, 0, 0) == 0)


def end_with_launcher(environ: Mapping[str, str]) -> None:
    """In a worker, or in a process that a worker started to do its work.

    A launcher that died before this call is noticed too.
    """
    end_with_parent()
    launcher = environ.get(LAUNCHER)
    if launcher and not psutil.pid_exists(int(launcher)):
        sys.exit("the launcher of this worker is gone")
