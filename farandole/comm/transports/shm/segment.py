"""Memory that several processes of a host share, with semaphores in it.

The memory is an anonymous file (`memfd_create`): it has no name, so it cannot be left behind. The
other processes open it through /proc/<pid>/fd while its maker lives, and when the last of them has
ended, however that was, the system takes it back. It is not limited by the size of /dev/shm.

Why semaphores, and not flags in the memory: on ARM a flag may become visible before the data that
it announces, and Python has no fence to prevent that. POSIX names sem_post, sem_trywait and
sem_timedwait among the functions that synchronise memory (IEEE 1003.1, 4.12): what was written
before a post is visible after the wait that it ends. And who waits can sleep in the kernel, so more
ranks than cores do no harm.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import select
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch

from farandole.comm.transports.messages import PeerLost

SEMAPHORE_BYTES = 64  # a sem_t takes 32 at most; a cache line each, so that none is shared
_SLICE_SECONDS = 0.05  # how long to sleep before asking whether the peer still lives
_SPIN_SECONDS = 50e-6
_MAP_FIXED = 0x10  # on all Linux architectures that PyTorch runs on


class Segment:
    """A piece of shared memory: made by one process, opened by others."""

    def __init__(self, descriptor: int, length: int) -> None:
        self.descriptor = descriptor
        self.length = length
        self.memory = mmap.mmap(descriptor, length)
        self.bytes = torch.frombuffer(self.memory, dtype=torch.uint8)
        self.address = self.bytes.data_ptr()

    @classmethod
    def make(cls, length: int, committed: int) -> Segment:
        """A new one, filled with zeros. Its first `committed` bytes are set aside at once.

        Raises `OSError` when there is no room, rather than being killed for it later.
        """
        # A process that the script starts must not inherit the descriptor: it would keep the
        # memory.
        descriptor = os.memfd_create("farandole", os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, length)
            # Without this, pages are handed out at the first write, and a lack of them ends in
            # SIGBUS.
            os.posix_fallocate(descriptor, 0, committed)
            return cls(descriptor, length)
        except BaseException:
            os.close(descriptor)
            raise

    @classmethod
    def open(cls, pid: int, descriptor: int, length: int) -> Segment:
        """The segment that process `pid` made and knows by `descriptor`."""
        own = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
        try:
            return cls(own, length)
        finally:
            os.close(own)  # the mapping stays

    def tensor(self, offset: int, length: int, dtype: torch.dtype) -> torch.Tensor:
        """`length` bytes from `offset` on, seen as numbers."""
        return self.bytes[offset : offset + length].view(dtype)


def replace_pages(address: int, length: int) -> None:
    """Puts private memory, filled with zeros, where a shared mapping was. Raises `OSError`."""
    if address % mmap.PAGESIZE:
        raise OSError(errno.EINVAL, f"memory at {address:#x} does not begin with a page")
    place = ctypes.CDLL(None, use_errno=True).mmap
    place.restype = ctypes.c_void_p
    place.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED
    if place(address, length, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0) != address:
        raise OSError(ctypes.get_errno(), "mmap failed")


class Statements:
    """A `Board` in shared memory: for every rank a row of bytes, one for each that it waited for.

    Each byte tells something by itself, so it does not matter in which order they become visible.
    """

    def __init__(self, memory: torch.Tensor, rank: int) -> None:
        self._rows = memory.numpy()
        self._rank = rank

    def write(self, waited_for: Sequence[int]) -> None:
        self._rows[self._rank, list(waited_for)] = 1

    def read(self) -> dict[int, list[int]]:
        return {rank: row.nonzero()[0].tolist() for rank, row in enumerate(self._rows) if row.any()}

    def any(self) -> bool:
        return bool(self._rows.any())


class Peers:
    """The other processes: whether they still live, by rank."""

    def __init__(self, pids: Sequence[int], rank: int) -> None:
        self._descriptors = {
            peer: os.pidfd_open(pid) for peer, pid in enumerate(pids) if peer != rank
        }

    def lives(self, peer: int) -> bool:
        """A pidfd becomes readable when its process ends, even if nobody has reaped it yet."""
        poller = select.poll()
        poller.register(self._descriptors[peer], select.POLLIN)
        return not poller.poll(0)

    def close(self) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()


class Semaphores:
    """Counting semaphores in a segment, by index. `peers` are those who can be waited for."""

    def __init__(
        self,
        segment: Segment,
        offset: int,
        peers: Peers,
        timeout: timedelta,
        *,
        statements: Statements | None = None,
        spin: bool,
    ) -> None:
        self._base = segment.address + offset
        self._statements = statements
        self._segment = segment  # keeps the memory mapped
        self._peers = peers
        self._timeout_seconds = timeout.total_seconds()
        self._spin_seconds = _SPIN_SECONDS if spin else 0.0
        # Through PyDLL the GIL is kept: right for calls that take less time than giving it up.
        # Through CDLL it is released: right for those that sleep.
        # To keep a copy of errno takes a fifth of such a call, and only the first wants it.
        self._init = ctypes.PyDLL(None, use_errno=True).sem_init
        self._init.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_uint]
        quick = ctypes.PyDLL(None)
        self._post, self._try = quick.sem_post, quick.sem_trywait
        self._post.argtypes = self._try.argtypes = [ctypes.c_void_p]
        self._value = quick.sem_getvalue
        self._value.argtypes = [ctypes.c_void_p, ctypes.POINTER(ctypes.c_int)]
        self._sleep = _sleeper(ctypes.CDLL(None, use_errno=True))

    def initialise(self, counts: Sequence[int]) -> None:
        """By the segment's maker, before anybody else opens it."""
        for index, count in enumerate(counts):
            if self._init(self.address(index), 1, count):
                raise OSError(ctypes.get_errno(), "sem_init failed")

    def address(self, index: int) -> int:
        """Of a semaphore, for `post_all` and `wait_all`."""
        return self._base + index * SEMAPHORE_BYTES

    def post(self, index: int) -> None:
        self._post(self._base + index * SEMAPHORE_BYTES)

    def post_all(self, addresses: Sequence[int]) -> None:
        post = self._post
        for address in addresses:
            post(address)

    def try_wait(self, index: int) -> bool:
        return not self._try(self._base + index * SEMAPHORE_BYTES)

    def wait(self, index: int, peer: int) -> None:
        """Takes one, which `peer` posts. Raises `PeerLost` when it has ended or takes too long."""
        address = self.address(index)
        if self._try(address):
            self._wait_long(address, peer)

    def wait_all(self, awaited: Sequence[tuple[int, int]]) -> None:
        """Takes one of each, given by its address and the peer that posts it."""
        failed = self._try
        for address, peer in awaited:
            if failed(address):
                self._wait_long(address, peer)

    def _wait_long(self, address: int, peer: int) -> None:
        begin = time.monotonic()
        # A peer that has a core of its own usually arrives within microseconds, and to fall asleep
        # and be woken takes longer. Where ranks share cores, the peer needs this one: `spin` is off
        # there.
        while time.monotonic() - begin < self._spin_seconds:
            if not self._try(address):
                return
        while not self._sleep(address, _SLICE_SECONDS):
            lost = self.lost(peer, begin)
            # The order matters: look whether the peer lives, then try once more. The other way
            # round, a peer that posts and ends between the two would be taken for lost, and its
            # last contribution with it.
            if lost is not None and self._try(address):
                raise lost

    def value(self, index: int) -> int:
        """How often it could be taken now."""
        count = ctypes.c_int()
        self._value(self.address(index), ctypes.byref(count))
        return count.value

    def doze(self, index: int) -> bool:
        """Takes one if one comes within a short while; at first without falling asleep."""
        if self._spin_seconds:
            address = self.address(index)
            end = time.monotonic() + self._spin_seconds
            while time.monotonic() < end:
                if not self._try(address):
                    return True
        return self.sleep(index)

    def sleep(self, index: int) -> bool:
        """Takes one if one comes within a short while."""
        return self._sleep(self.address(index), _SLICE_SECONDS)

    def lost(self, peer: int, since: float) -> PeerLost | None:
        """Why `peer`, waited for since then, should not be waited for any longer."""
        if not self._peers.lives(peer):
            return PeerLost([peer], "has ended")
        # When one rank has given up, the collective cannot end any more. The others give up as
        # well, rather than each wait for its own time limit after the one before.
        gave_up = self._statements is not None and self._statements.any()
        if gave_up or time.monotonic() - since > self._timeout_seconds:
            return PeerLost.late([peer], self._timeout_seconds)
        return None


def _sleeper(library: ctypes.CDLL) -> Callable[[int, float], bool]:
    """Waits on a semaphore for so many seconds; says whether it got one."""
    limit = ctypes.POINTER(_TimeSpec)
    if hasattr(library, "sem_clockwait"):  # glibc from 2.30 on
        by_clock = library.sem_clockwait
        by_clock.argtypes = [ctypes.c_void_p, ctypes.c_int, limit]
        # Against the wall clock, a correction of the time would lengthen or end the wait.
        clock = time.CLOCK_MONOTONIC
        return lambda address, seconds: not by_clock(address, clock, _moment(clock, seconds))
    by_date = library.sem_timedwait
    by_date.argtypes = [ctypes.c_void_p, limit]
    return lambda address, seconds: not by_date(address, _moment(time.CLOCK_REALTIME, seconds))


class _TimeSpec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def _moment(clock: int, seconds_from_now: float) -> _TimeSpec:
    moment = time.clock_gettime(clock) + seconds_from_now
    seconds = int(moment)
    return _TimeSpec(seconds, int((moment - seconds) * 1e9))
