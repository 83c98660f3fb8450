"""A dataset over chunks: as long as all of them together, with as many at hand as its window has.

It is an ordinary dataset, so that all of `run.loader` holds for it: every sample once, resuming in
the middle of an epoch on other ranks, workers that come and go, DataLoader's processes. What is its
own is the order in which it wants to be read (`lanes`).
"""

from __future__ import annotations

import bisect
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any, Final

import numpy as np
from torch.utils.data import Dataset

from farandole.data.bad_samples import BadSample, OnError, check_policy
from farandole.data.chunks.batches import NamedSamples
from farandole.data.chunks.files.shard_file import ShardError
from farandole.data.chunks.lanes import Indices, Readers, lane_order
from farandole.data.chunks.plan import PlannedBatch, planned
from farandole.data.chunks.read_ahead import AHEAD, ChunkReader
from farandole.data.chunks.source import ChunkSource
from farandole.data.order import mixed
from farandole.errors import DataError, FarandoleError, UserError

WINDOW: Final = 16

Transform = Callable[[Any], Any]


class ChunkedDataset(Dataset[Any]):
    """Samples of several sources, each through `transform`."""

    def __init__(
        self,
        sources: Sequence[ChunkSource],
        transform: Transform | None = None,
        window: int = WINDOW,
        ahead: int = AHEAD,
        *,
        on_error: OnError = "raise",
    ) -> None:
        check_policy(on_error)
        if window < 1:
            raise UserError(f"window={window}: at least 1 chunk is read at a time.")
        if ahead < 0:
            raise UserError(f"ahead={ahead}: no chunk is read ahead with 0, and so many with more.")
        self.sources = list(sources)
        self.window = window
        self.ahead = ahead
        self.on_error = on_error
        self.transform = transform
        self._where = [
            (source, chunk) for source in self.sources for chunk in range(len(source.sizes))
        ]
        self.chunk_sizes = [source.sizes[chunk] for source, chunk in self._where]
        self._ends = list(accumulate(self.chunk_sizes))
        self._reader: tuple[int, ChunkReader] | None = None  # of the process with this number
        self.chunks_read = 0  # by this process

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def order(self, readers: Readers, seed: int | None, epoch: int) -> Indices:
        """Of an epoch that begins with these readers; `seed` None: as the samples lie."""
        seed = None if seed is None else mixed(seed, epoch)
        return lane_order(self.chunk_sizes, readers.lanes(len(self)), self.window, seed)

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        number, row = self._chunk_of(index)
        try:
            samples = self._chunks.take(number)
        except Exception as error:  # a shard that cannot be read is no bad sample
            raise DataError(self._named(index, error)) from error
        try:
            sample = samples[row]
            return sample if self.transform is None else self.transform(sample)
        except Exception as error:
            reason = self._named(index, error)
            if self.on_error == "skip" and not isinstance(error, ShardError):
                return BadSample(reason)
            raise DataError(reason) from error

    def _named(self, index: int, error: Exception) -> str:
        """What is wrong with a sample, with the shard and its place in it."""
        is_ours = isinstance(error, FarandoleError)
        said = str(error) if is_ours else f"{type(error).__name__}: {error}"
        return f"{self._at(index)}: {said}"

    def _at(self, index: int) -> str:
        """The shard of a sample, and its place in it."""
        number, row = self._chunk_of(index)
        source, chunk = self._where[number]
        at = sum(source.sizes[:chunk]) + row
        return f"sample {at} of {source.name} (sample {index} of the dataset)"

    def _chunk_of(self, index: int) -> tuple[int, int]:
        """The chunk of a sample, and its row in it."""
        number = bisect.bisect_right(self._ends, index)
        return number, index - (self._ends[number] - self.chunk_sizes[number])

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """A batch, as DataLoader asks for it; one that was planned says what comes next."""
        if isinstance(indices, PlannedBatch):
            self._chunks.expect(indices)
        return NamedSamples((self[index] for index in indices), lambda at: self._at(indices[at]))

    def planned(
        self, batches: Callable[[], Iterable[list[int]]], processes: int
    ) -> Iterator[PlannedBatch]:
        """The batches, which `processes` take in turn, with what they need to read ahead."""
        ends = np.asarray(self._ends)
        return planned(
            batches,
            lambda batch: np.searchsorted(ends, batch, side="right"),
            processes,
            self.window + self.ahead,
        )

    @property
    def _chunks(self) -> ChunkReader:
        """Of this process: threads do not outlive a fork."""
        if self._reader is None or self._reader[0] != os.getpid():
            self._reader = os.getpid(), ChunkReader(self._read, self.window, self.ahead)
        return self._reader[1]

    def _read(self, number: int, following: int | None) -> Sequence[Any]:
        if following is not None:
            source, chunk = self._where[following]
            source.expect(chunk)
        source, chunk = self._where[number]
        self.chunks_read += 1
        return source.read(chunk)

    def __getstate__(self) -> dict[str, Any]:
        """For a process that reads its own."""
        return {**self.__dict__, "_reader": None, "chunks_read": 0}
