"""How a process must be set up that moves large frames all the time."""

from __future__ import annotations

import ctypes
import os
import resource
import sys

import torch

_KEPT_BYTES = 64 << 20  # of free memory
_CONNECTIONS = 2048


def keep_freed_memory() -> None:
    """Frames are got and freed all the time. Given back to the system each time, their pages would
    have to be cleared each time: for 16 MiB over TCP that takes a fifth of the time."""
    if sys.platform.startswith("linux"):
        trim_threshold, top_pad, mmap_threshold = -1, -2, -3  # M_TRIM_THRESHOLD, …, <malloc.h>
        libc = ctypes.CDLL(None)
        for setting in (mmap_threshold, trim_threshold, top_pad):
            libc.mallopt(setting, _KEPT_BYTES)


def limit_connections() -> None:
    """For a process that is a server and nothing else. Each connection is a file, and holds up to
    256 KiB before its sender is known: this bounds what all strangers together can make it hold."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = _CONNECTIONS if most == resource.RLIM_INFINITY else min(_CONNECTIONS, most)
    resource.setrlimit(resource.RLIMIT_NOFILE, (few, most))


def limit_threads() -> None:
    """For a process that is a server and nothing else: it handles one message after the other. On
    a machine with many cores a few threads help with large ones; elsewhere they would only fight
    the workers."""
    torch.set_num_threads(max(1, min(4, (os.cpu_count() or 1) // 4)))
