"""Which indices a rank reads: for the DataLoader that it loads with, and for scripts that ask."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import chain

from torch.utils.data import Sampler

from farandole.comm import Group
from farandole.data.dealing import Dealing, rest_of
from farandole.data.options import LoaderOptions
from farandole.data.position import Position
from farandole.data.shares import Shares, warn_of_rest


class RankBatches(Sampler[list[int]]):
    """This rank's batches of indices: of one epoch, or of what is left of it, at a time."""

    def __init__(
        self,
        count: int,
        group: Group,
        order: Callable[[int, int], Sequence[int]],
        options: LoaderOptions,
        plan: Callable[[Callable[[], Iterator[list[int]]]], Iterator[list[int]]] | None = None,
    ) -> None:
        """`plan` makes batches that say what comes after them; it may read them twice."""
        self._count = count
        self._plan = plan
        self._group = group
        self._options = options
        self._order = order
        self.begin(0, [], 0)

    @property
    def rank(self) -> int:
        """This worker's number among those that share a pass that would begin now."""
        return self._group.readers.index(self._group.members[self._group.rank])

    @property
    def shares(self) -> Shares:
        """Of a pass that would begin now."""
        size = len(self._group.readers)
        whole = Shares(self._count, size, self._options.global_batch(size), self._options.drop_last)
        return whole if self._options.is_training else replace(whole, evaluates=True)

    def begin(self, epoch: int, returned: Sequence[int], start: int) -> None:
        """What is to be iterated next: of `epoch` the samples that were `returned`, then all from
        `start` on. Who shares them are the ranks of this moment."""
        self._epoch = epoch
        self.dealing = self._deal(returned, start)
        if self.dealing is None and not self.shares.drop_last and self.rank == 0:
            warn_of_rest(self._count - start + len(returned), self.shares.size)

    def of(self, position: Position) -> Iterator[list[int]]:
        """Those of the position's epoch that it has not used before a pass begins."""
        returned = position.returned if position.resume_at else []  # else of a pass under way
        return self._batches(self._deal(returned, position.resume_at), position.epoch)

    def _deal(self, returned: Sequence[int], start: int) -> Dealing | None:
        rest = rest_of(self.shares, returned, start)
        if rest is None:
            return None
        return Dealing(rest, self._group.readers, tuple(returned), start)

    def _batches(self, dealing: Dealing | None, epoch: int) -> Iterator[list[int]]:
        if dealing is None:
            return iter(())
        # The whole epoch's order, also after a resume: places are places in it. Drawing an order of
        # the rest would repeat samples and leave out others.
        order = self._order(epoch, self._count)
        if self._plan is None:
            return self._cut(dealing, order)
        return self._plan(lambda: self._cut(dealing, order))

    def _cut(self, dealing: Dealing, order: Sequence[int]) -> Iterator[list[int]]:
        rank = self.rank  # it may change while others read the rest of this dealing
        for step in range(dealing.shares.steps):
            yield [order[place] for place in dealing.share(step, rank)]

    def __iter__(self) -> Iterator[list[int]]:
        return self._batches(self.dealing, self._epoch)

    def __len__(self) -> int:
        return self.dealing.shares.steps if self.dealing else 0


class RankSampler(Sampler[int]):
    """The indices that this rank reads in the epoch under way, or else in the next one.

    Its length is that of a whole epoch. Iterating over it uses nothing up.
    """

    def __init__(self, batches: RankBatches, position: Position) -> None:
        self._batches = batches
        self._position = position

    def __iter__(self) -> Iterator[int]:
        return chain.from_iterable(self._batches.of(self._position))

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
        return self._batches.of(self._position)

    def __len__(self) -> int:
        return self._batches.shares.steps
