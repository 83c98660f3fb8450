"""A child that ends when its parent does, even if the parent is killed outright (Linux only).

The kernel does it, by a signal that a child asks for. Three rules come with that:

- The signal comes when the *thread* ends that forked the child. So only the main thread's children
  ask for it; `watchdog` takes care of all others.
- A parent that died before the child asked is not noticed. So the child looks for it afterwards.
- The child's own children do not have it. They too are the watchdog's business.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any

import psutil

from farandole.environment import LAUNCHER

_SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG, <sys/prctl.h>
_SET_CHILD_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER


def end_with_parent() -> None:
    """Asks the kernel to kill this process when its parent dies."""
    if (prctl := _prctl()) is not None:
        prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)


def tied_to_this_process() -> Callable[[], None]:
    """What a child of this process calls between fork and exec (`preexec_fn`), to end with it.

    All is looked up here: a child of a process with threads must not wait for a lock.
    """
    parent = os.getpid()
    prctl = _prctl() if threading.current_thread() is threading.main_thread() else None

    def tie() -> None:
        if prctl is not None:
            prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
            if os.getppid() != parent:  # it died in between
                os._exit(1)

    return tie


def adopt_orphans() -> bool:
    """Makes this process the parent of its descendants whose parent has ended; False: it cannot."""
    prctl = _prctl()
    return prctl is not None and bool(prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0)


def end_with_launcher(environ: Mapping[str, str]) -> None:
    """In a worker, or in a process that a worker started to do its work.

    A launcher that died before this call is noticed too.
    """
    end_with_parent()
    launcher = environ.get(LAUNCHER)
    if launcher and not is_running(int(launcher)):
        sys.exit("the launcher of this worker is gone")


def is_running(pid: int) -> bool:
    """Whether there is such a process. One that has ended and is not yet reaped is none."""
    try:
        return bool(psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD))
    except psutil.NoSuchProcess:
        return False
    except psutil.AccessDenied:
        return True


def _prctl() -> Callable[..., Any] | None:
    return ctypes.CDLL(None).prctl if sys.platform.startswith("linux") else None
