"""Which process runs a trial: a trial whose process is gone is run again."""

from __future__ import annotations

import os
import socket

import psutil


def this_process() -> str:
    return _owner(os.getpid(), psutil.Process().create_time())


def is_lost(owner: str) -> bool:
    """Whether it was a process of this host that is gone. Of others this host knows nothing."""
    host, _, rest = owner.partition(" ")
    if host != socket.gethostname() or not rest:
        return False
    pid, _, _ = rest.partition(" ")
    try:
        return _owner(int(pid), psutil.Process(int(pid)).create_time()) != owner
    except (ValueError, psutil.NoSuchProcess):
        return True
    except psutil.AccessDenied:
        return False


def _owner(pid: int, created: float) -> str:
    return f"{socket.gethostname()} {pid} {created:.2f}"
