"""Has the C library keep memory that is freed, for a process that will soon want as much again.

By default glibc gives the end of the heap back to the system whenever 128 KiB of it are free. A
process that makes batch after batch then gets the same pages again and again, each of them filled
with zeros by the system: for samples of 50 KB that took a tenth of its time.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from typing import Final

_TRIM_THRESHOLD: Final = -1  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of malloc.h
_MMAP_THRESHOLD: Final = -3
_KEPT_BYTES: Final = 64 << 20
_LARGEST_BYTES: Final = 32 << 20  # the largest value that glibc takes for blocks of the heap
_OWN_SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_")


def keep_freed_memory(environ: Mapping[str, str] = os.environ) -> bool:
    """Up to 64 MiB of it. False, and nothing done: the user has said how much, or this C library
    cannot be told."""
    if any(name in environ for name in _OWN_SETTINGS):
        return False
    if "malloc" in environ.get("GLIBC_TUNABLES", ""):
        return False
    try:
        set_option = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # another C library, or another system
        return False
    # To set one ends that glibc adapts both by itself, so both are set.
    return bool(
        set_option(_MMAP_THRESHOLD, _LARGEST_BYTES) and set_option(_TRIM_THRESHOLD, _KEPT_BYTES)
    )
