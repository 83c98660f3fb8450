"""Which chunks a process will need, and how often: told to it with the batches that it reads.

A dataset only hears of indices, batch by batch, in a process of DataLoader's perhaps. To read ahead
it has to know what comes after them. So a batch carries what is to be known from then on: the next
chunks in the order in which they are needed, and how many samples of each this process takes.
Nothing else has to be sent anywhere, and whatever deals the rest of an epoch anew plans it anew.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt


class PlannedBatch(list[int]):
    """Indices of samples. `coming` are pairs of a chunk and the uses that this process has for it;
    `begins` says that whatever was planned before is over."""

    coming: Sequence[tuple[int, int]] = ()
    begins: bool = False


class _Process:
    """What one process needs of which chunk, and what it was told of that."""

    def __init__(self) -> None:
        self.uses: Counter[int] = Counter()
        self._chunks: list[int] = []  # in the order in which they are needed
        self._turns: list[int] = []  # the batch of this process that needs each first
        self._reached = self._told = 0

    def add(self, turn: int, chunks: Iterable[int]) -> None:
        for chunk in chunks:
            if chunk not in self.uses:
                self._chunks.append(chunk)
                self._turns.append(turn)
            self.uses[chunk] += 1

    def tell(self, turn: int, at_once: int) -> list[tuple[int, int]]:
        while self._reached < len(self._turns) and self._turns[self._reached] <= turn:
            self._reached += 1
        begin, self._told = self._told, min(len(self._chunks), self._reached + at_once)
        return [(chunk, self.uses[chunk]) for chunk in self._chunks[begin : self._told]]


def planned(
    batches: Callable[[], Iterable[list[int]]],
    chunk_of: Callable[[Sequence[int]], npt.NDArray[np.int64]],
    processes: int,
    at_once: int,
) -> Iterator[PlannedBatch]:
    """The batches, which `processes` read in turn. With each, its process is told of the chunks
    that it needs for it and of `at_once` more, unless it was told before.

    `batches` is called twice: nothing but chunks is kept of the first time.
    """
    told = [_Process() for _ in range(processes)]
    for number, batch in enumerate(batches()):
        told[number % processes].add(number // processes, chunk_of(batch).tolist())
    for number, batch in enumerate(batches()):
        turn = number // processes
        found = PlannedBatch(batch)
        found.coming = told[number % processes].tell(turn, at_once)
        found.begins = turn == 0
        yield found
