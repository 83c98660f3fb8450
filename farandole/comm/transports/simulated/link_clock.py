"""When the link of each pretended host is free again: shared by all processes of a job.

Every host has a link of its own, with one rate in each direction. A message occupies the outgoing
direction of its sender's link and then the incoming one of its receiver's:

    host 0  out  ██ a ██ b ██               a and b share the rate of host 0
    host 1  in     ██ a ██                  each arrives when its last frame does,
    host 2  in             ██ b ██          and the delay later

Messages take the link one after the other, so that all flows together get the rate. Short ones do
not queue behind long ones: on a real link their frames would pass between those of the others. The
file has two numbers for each host, by the system's monotonic clock, which all processes of a
machine read alike.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from farandole.network_link import NetworkLink

_TIME: Final = struct.Struct("d")
_SHORT_BYTES = 16 * 1024
_BURST_SECONDS = 0.001
"""What a link may send at once after a pause, as seconds of its rate. `farandole emulate` allows
the same; a network card and a switch have buffers of about that size."""
_SHORTEST_SLEEP_SECONDS = 50e-6  # a sleep takes about so long even if it is for less


@dataclass(frozen=True)
class Transit:
    """When a message has left its host, and when it is there, by the monotonic clock."""

    left: float
    arrives: float


class LinkClock:
    """One process's view of the links. Any thread may use it."""

    def __init__(self, path: Path, hosts: int, link: NetworkLink) -> None:
        self.link = link
        self._thread = threading.Lock()
        size = 2 * hosts * _TIME.size
        # Whoever comes first makes the file. Zeros mean that no link was ever used.
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if os.fstat(self._file).st_size < size:
                os.ftruncate(self._file, size)
            self._memory = mmap.mmap(self._file, size)
        except BaseException:
            os.close(self._file)
            raise

    def book(self, nbytes: int, source: int, to: int, at: float | None = None) -> Transit:
        """Sends a message of `nbytes` from one host to another, now or at a time that is past."""
        seconds = self.link.seconds(nbytes)
        with self._locked():
            now = time.monotonic() if at is None else at
            earliest = now - _BURST_SECONDS
            out = max(self._get(2 * source), earliest) + seconds
            into = max(out, max(self._get(2 * to + 1), earliest) + seconds)
            self._set(2 * source, out)
            self._set(2 * to + 1, into)
        if nbytes <= _SHORT_BYTES:
            out, into = min(out, now + seconds), min(into, now + seconds)
        return Transit(max(out, now), max(into, now) + self.link.delay_seconds)

    def close(self) -> None:
        self._memory.close()
        os.close(self._file)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        # The lock of the file is the process's: the other one keeps its threads apart. Both are
        # held for a few microseconds, and the kernel releases that of a process that has ended.
        with self._thread:
            fcntl.flock(self._file, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.flock(self._file, fcntl.LOCK_UN)

    def _get(self, place: int) -> float:
        (value,) = _TIME.unpack_from(self._memory, place * _TIME.size)
        return float(value)

    def _set(self, place: int, value: float) -> None:
        _TIME.pack_into(self._memory, place * _TIME.size, value)


def sleep_until(moment: float) -> None:
    """By the monotonic clock."""
    left = moment - time.monotonic()
    if left > _SHORTEST_SLEEP_SECONDS:
        time.sleep(left)
