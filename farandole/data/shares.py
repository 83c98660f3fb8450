"""Who gets which samples: an exact cut of an epoch into global batches and ranks' shares.

Every sample is used exactly once, every rank takes the same number of steps, and these are the
steps that one rank alone would take. Other libraries repeat or drop samples here.

    training: 10 samples, 3 ranks, batch 6     7 samples, same ranks and batch
      step 0   rank 0  rank 1  rank 2            step 0   rank 0  rank 1  rank 2
               0 1     2 3     4 5                        0 1     2 3     4 5
      step 1   6       7       8 9               step 1   6       6       6
               shares differ by at most one               each counts a third

A step with fewer samples than ranks is shared too: several ranks read the same samples, and each
counts its part of them. All ranks read all of them, as one rank alone would, unless that is more
than they read in other steps: then each reads one. `share_weight` is what a rank's mean gradient
must be multiplied by so that the average over ranks is the mean over the samples of the step.

A script that evaluates adds up what it has seen, and must see every sample on one rank only. There
such a tail borrows samples from the step before it, or joins it if that has too few to lend.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from typing import NamedTuple

from farandole.errors import UserError


@dataclass(frozen=True)
class Shares:
    """The cut of `count` samples over `size` ranks in steps of `global_batch` samples."""

    count: int
    size: int
    global_batch: int
    drop_last: bool = False
    evaluates: bool = False  # every sample is read by one rank only
    is_rest: bool = False  # of an epoch that goes on after a resume: it may be short
    quotas: tuple[int, ...] = ()  # of a full step, by rank; none: as equal as can be

    def __post_init__(self) -> None:
        if self.global_batch < self.size:
            raise UserError(
                f"a global batch of {self.global_batch} cannot be shared by {self.size} workers. "
                f"Use global_batch_size >= {self.size}, or fewer workers."
            )
        assert not self.quotas or (
            (len(self.quotas), sum(self.quotas)) == (self.size, self.global_batch)
            and min(self.quotas) >= 1
        )
        if self.is_rest:
            return
        if self.count == 0:
            raise UserError("the dataset is empty: there is nothing to share.")
        if self.count < self.size:
            raise UserError(
                f"{self.count} samples cannot be shared by {self.size} workers: each needs at "
                f"least one. Use at most {self.count} workers."
            )
        if self.drop_last and self.count < self.global_batch:
            raise UserError(
                f"drop_last would drop all {self.count} samples: a global batch is "
                f"{self.global_batch}. Use a smaller batch or drop_last=False."
            )

    @property
    def _tail(self) -> int:
        return self.count % self.global_batch

    @property
    def _tail_is_short(self) -> bool:
        """Whether evaluation cannot give every rank a sample of the tail."""
        return self.evaluates and not self.drop_last and 0 < self._tail < self.size

    @property
    def _lent(self) -> int:
        """Samples of the last whole batch that belong to the step of the tail instead."""
        if not self._tail_is_short:
            return 0
        lent = self.size - self._tail
        return lent if can_lend(self.global_batch, self._tail, self.size) else 0

    @property
    def steps(self) -> int:
        """Steps in an epoch, the same for every rank."""
        whole = self.count // self.global_batch
        joins = self._tail_is_short and not self._lent
        return whole + (self._tail > 0 and not self.drop_last and not joins)

    @property
    def dropped(self) -> int:
        """Samples that an epoch leaves out; 0 unless `drop_last`."""
        return self._tail if self.drop_last else 0

    def after(self, done: int) -> Shares | None:
        """The cut of what is left once `done` samples are used; None when that makes no step.

        Resuming needs it: `done` may lie anywhere when the run was saved on other numbers.
        """
        left = self.count - done
        least = self.global_batch if self.drop_last else self.size if self.evaluates else 1
        return replace(self, count=left, is_rest=done > 0) if left >= least else None

    def global_range(self, step: int) -> range:
        """Positions in the epoch's order that all ranks together take in `step`."""
        # Only the border between the last two steps moves, by what is lent. So the ranges of all
        # steps lie end to end: every sample is in exactly one of them.
        start, stop = step * self.global_batch, (step + 1) * self.global_batch
        from_end = self.steps - 1 - step
        if from_end == 0:
            start, stop = start - self._lent, self.count - self.dropped
        elif from_end == 1:
            stop -= self._lent
        return range(start, stop)

    def part(self, step: int, rank: int) -> Part:
        length = len(self.global_range(step))
        return part_of(length, self.size, rank, self.global_batch, self.quotas)

    def share(self, step: int, rank: int) -> range:
        """The part of `global_range(step)` that `rank` reads; never empty."""
        return self.global_range(step)[self.part(step, rank).where]

    @property
    def fewest(self) -> int:
        """Samples that any rank reads in any step: the last one is the shortest."""
        return min(len(self.share(self.steps - 1, rank)) for rank in range(self.size))

    def share_weight(self, step: int, rank: int) -> float:
        """`rank`'s number of samples over the average number of samples per rank."""
        return self.part(step, rank).samples * self.size / len(self.global_range(step))


class Part(NamedTuple):
    """What one rank reads of the samples of a step."""

    start: int
    stop: int
    readers: int  # of each sample: so many ranks, this one among them

    @property
    def where(self) -> slice:
        return slice(self.start, self.stop)

    @property
    def samples(self) -> float:
        """What it counts as, so that all ranks' add up to the samples of the step."""
        return (self.stop - self.start) / self.readers


def part_of(
    length: int, size: int, rank: int, global_batch: int, quotas: tuple[int, ...] = ()
) -> Part:
    """`rank`'s part of `length` items: parts differ by at most one, or are as `quotas` of a whole
    batch; every item is read."""
    # Rounding the borders, not the lengths: the end of a part is the start of the next, so the
    # parts cover all items without overlap.
    if length >= size and quotas and global_batch > size:
        # One for each rank, and what is left by what the quotas have beyond one.
        spare, over = length - size, global_batch - size
        before = sum(quotas[:rank]) - rank
        after = before + quotas[rank] - 1
        return Part(rank + before * spare // over, rank + 1 + after * spare // over, readers=1)
    if length >= size:
        return Part(rank * length // size, (rank + 1) * length // size, readers=1)
    if length <= global_batch // size:
        return Part(0, length, readers=size)
    # Item i is read by ranks i, i + length, i + 2·length, …; numbers of readers differ by one at
    # most, and each rank counts its item as 1/readers. All counts add up to `length`.
    turn = rank % length
    return Part(turn, turn + 1, readers=len(range(turn, size, length)))


def can_lend(batch: int, tail: int, size: int) -> bool:
    """Whether a batch and the tail after it have a sample for every rank in both steps."""
    return batch + tail >= 2 * size


def warn_of_rest(left: int, size: int) -> None:
    """Says that an evaluation goes on after a resume, and ends early."""
    if left > 0:
        warnings.warn(
            f"the {left} sample(s) left of the resumed evaluation cannot be shared by {size} "
            "workers; it leaves them out.",
            stacklevel=3,
        )
