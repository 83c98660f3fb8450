"""Which indices a rank reads: for the DataLoader that it loads with, and for scripts that ask."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain

from torch.utils.data import Sampler

from farandole.data.options import LoaderOptions
from farandole.data.position import Position
from farandole.data.shares import Shares, warn_of_rest


class RankBatches(Sampler[list[int]]):
    """This rank's batches of indices, one epoch at a time."""

    def __init__(
        self,
        shares: Shares,
        rank: int,
        order: Callable[[int, int], list[int] | range],
        options: LoaderOptions,
    ) -> None:
        self._options = options
        self._training, self._evaluation = shares, replace(shares, evaluates=True)
        self.rank = rank
        self._order = order
        self.begin(0, 0)

    @property
    def shares(self) -> Shares:
        """Of a pass that would begin now."""
        return self._training if self._options.is_training else self._evaluation

    def begin(self, epoch: int, done: int) -> None:
        """The next epoch to be iterated, and how many of its samples are used already."""
        self._epoch, self._done = epoch, done
        self.rest = self.shares.after(done)
        if self.rest is None and not self.shares.drop_last and self.rank == 0:
            warn_of_rest(self.shares.count - done, self.shares.size)

    def of(self, epoch: int, done: int) -> Iterator[list[int]]:
        """Those of an epoch of which `done` samples are used already."""
        return self._batches(self.shares.after(done), epoch, done)

    def _batches(self, rest: Shares | None, epoch: int, done: int) -> Iterator[list[int]]:
        if rest is None:
            return
        # The whole epoch's order, also after a resume: `done` is a place in it. Drawing an order of
        # the rest would repeat samples and leave out others.
        order = self._order(epoch, self._training.count)
        for step in range(rest.steps):
            yield [order[done + at] for at in rest.share(step, self.rank)]

    def __iter__(self) -> Iterator[list[int]]:
        return self._batches(self.rest, self._epoch, self._done)

    def __len__(self) -> int:
        return self.rest.steps if self.rest else 0


class RankSampler(Sampler[int]):
    """The indices that this rank reads in the epoch under way, or else in the next one.

    Its length is that of a whole epoch. Iterating over it uses nothing up.
    """

    def __init__(self, batches: RankBatches, position: Position) -> None:
        self._batches = batches
        self._position = position

    def __iter__(self) -> Iterator[int]:
        position = self._position
        return chain.from_iterable(self._batches.of(position.epoch, position.resume_at))

    def __len__(self) -> int:
        shares, rank = self._batches.shares, self._batches.rank
        return sum(len(shares.share(step, rank)) for step in range(shares.steps))


class RankBatchSampler(Sampler[list[int]]):
    """The same in batches: `len` is the number of steps in a whole epoch."""

    def __init__(
        self, batches: RankBatches, position: Position, sampler: Sampler[int], batch_size: int
    ) -> None:
        self._batches = batches
        self._position = position
        self.sampler = sampler
        self.batch_size = batch_size
        self.drop_last = batches.shares.drop_last

    def __iter__(self) -> Iterator[list[int]]:
        return self._batches.of(self._position.epoch, self._position.resume_at)

    def __len__(self) -> int:
        return self._batches.shares.steps
