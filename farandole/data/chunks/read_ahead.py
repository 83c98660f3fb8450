"""The chunks that a process has at hand, and a thread that reads the next ones meanwhile.

    at hand    c3 c0 c5 │ c1 c4          at most `window` in use, and `ahead` more
                        └ being read, or there before they are needed

Only the thread of the consumer decides what is read and what goes; the other one reads. Where ranks
are threads of one process, and share a dataset, its consumers take turns. A chunk goes when its
last sample was taken, which a plan knows beforehand (`plan`). Without a plan, or where more chunks
are needed than there is room for, the one that was not needed for longest goes: it may have to be
read again, and is never wrong.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, Final

from farandole.data.chunks.plan import PlannedBatch
from farandole.errors import DataError

AHEAD: Final = 4
_READ_SECONDS: Final = 1800.0
_FORK_SECONDS: Final = 60.0

Chunk = Sequence[Any]
Read = Callable[[int, int | None], Chunk]
"""Reads a chunk by its number. The second one will be read after it, if that is known."""

_readers: weakref.WeakSet[ChunkReader] = weakref.WeakSet()


class ChunkReader:
    """Has at most `window + ahead` chunks at a time."""

    def __init__(self, read: Read, window: int, ahead: int) -> None:
        self._read = read
        self._room = window + ahead
        self._threads = ThreadPoolExecutor(1, "farandole-read-ahead") if ahead else None
        self._at_hand: OrderedDict[int, Future[Chunk]] = OrderedDict()
        self._read_chunks: dict[int, Chunk] = {}  # of those at hand: to ask a future takes longer
        self._coming: deque[int] = deque()
        self._uses: dict[int, int] = {}  # that a chunk still has, as far as that is known
        self._turn = threading.Lock()  # of a consumer
        _readers.add(self)

    def expect(self, batch: PlannedBatch) -> None:
        """Takes in what a batch says of the next ones, and begins to read."""
        with self._turn:
            self._expect(batch)

    def _expect(self, batch: PlannedBatch) -> None:
        if batch.begins:
            self._coming.clear()
            self._uses.clear()
        for chunk, uses in batch.coming:
            self._uses[chunk] = uses
            if chunk not in self._at_hand:
                self._coming.append(chunk)
        if batch.begins:
            for chunk in [each for each in self._at_hand if each not in self._uses]:
                self._drop(chunk)
        self._fill()

    def take(self, chunk: int) -> Chunk:
        """The chunk, for one sample of it."""
        with self._turn:
            return self._take(chunk)

    def _take(self, chunk: int) -> Chunk:
        found = self._read_chunks.get(chunk)
        if found is None:
            found = self._read_chunks[chunk] = self._awaited(chunk)
        self._at_hand.move_to_end(chunk)
        left = self._uses.get(chunk)
        if left == 1:
            del self._uses[chunk]
            self._drop(chunk)
            self._fill()
        elif left is not None:
            self._uses[chunk] = left - 1
        return found

    def _awaited(self, chunk: int) -> Chunk:
        if chunk not in self._at_hand:
            self._make_room()
            self._start(chunk)
        future = self._at_hand[chunk]
        try:
            return future.result(_READ_SECONDS)
        except TimeoutError:
            if future.done():  # it is the reading's own
                del self._at_hand[chunk]
                raise
            raise DataError(
                f"it is being read, and was not there after {_READ_SECONDS:.0f} s."
            ) from None
        except BaseException:
            self._at_hand.pop(chunk, None)  # whoever asks again tries again
            raise

    def settle(self) -> None:
        """Waits until nothing is being read."""
        wait(list(self._at_hand.values()), _FORK_SECONDS)

    def _start(self, chunk: int) -> None:
        if self._threads is not None:
            following = self._coming[0] if self._coming else None
            self._at_hand[chunk] = self._threads.submit(self._read, chunk, following)
            return
        future: Future[Chunk] = Future()
        future.set_result(self._read(chunk, None))
        self._at_hand[chunk] = future

    def _fill(self) -> None:
        while self._threads is not None and self._coming and len(self._at_hand) < self._room:
            chunk = self._coming.popleft()
            if chunk in self._uses and chunk not in self._at_hand:
                self._start(chunk)

    def _make_room(self) -> None:
        while len(self._at_hand) >= self._room:
            unplanned = (chunk for chunk in self._at_hand if chunk not in self._uses)
            self._drop(next(unplanned, next(iter(self._at_hand))))

    def _drop(self, chunk: int) -> None:
        self._read_chunks.pop(chunk, None)
        future = self._at_hand.pop(chunk, None)
        # One that is under way takes memory until it is read: wait for it, that the bound holds.
        if future is not None and not future.cancel():
            wait([future], _READ_SECONDS)


def _settle_all() -> None:
    """Before a fork: a library must not be in the middle of a read in the child, where nobody ends
    it. What the child inherits is not used (`ChunkedDataset` makes its own reader)."""
    for reader in list(_readers):
        reader.settle()


os.register_at_fork(before=_settle_all)
