"""Locks between the processes of a host, on files: the kernel's, so they end with their holder."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.001, 0.1


def _nothing() -> object:
    return None


@contextmanager
def file_lock(
    path: Path,
    seconds: float,
    *,
    shared: bool = False,
    sign_of_life: Callable[[], object] = _nothing,
) -> Iterator[None]:
    """Holds the lock on `path`, which is made if need be; many may hold a shared one at a time.

    Raises `TimeoutError`, naming the process that wrote its number last, when it cannot be had for
    `seconds` in which `sign_of_life` stays the same. `seconds` 0: it is tried once.
    """
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        _take(handle, path, seconds, shared, sign_of_life)
        if not shared:
            os.ftruncate(handle, 0)
            os.pwrite(handle, str(os.getpid()).encode(), 0)
        yield
    finally:
        os.close(handle)


def _take(
    handle: int, path: Path, seconds: float, shared: bool, sign_of_life: Callable[[], object]
) -> None:
    kind = (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB
    pause, sign = _FIRST_PAUSE_SECONDS, sign_of_life()
    deadline = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(handle, kind)
            return
        except BlockingIOError:
            now = sign_of_life()
            if now != sign:
                sign, deadline = now, time.monotonic() + seconds
            if time.monotonic() >= deadline:
                holder = os.pread(handle, 20, 0).decode(errors="replace") or "unknown"
                raise TimeoutError(
                    f"{path} is locked by another process (the last was {holder}), which has done "
                    f"nothing for {seconds:g} s"
                ) from None
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
