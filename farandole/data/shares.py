"""Who gets which samples: an exact cut of an epoch into global batches and ranks' shares.

Every sample is used exactly once and every rank takes the same number of steps, whatever the
numbers, as long as there is a sample for each rank. Other libraries repeat or drop samples here.

    10 samples, 3 ranks, global batch 6:      12 samples + 1, same ranks and batch:
      step 0   rank 0  rank 1  rank 2           step 0   rank 0  rank 1  rank 2
               0 1     2 3     4 5                       0 1     2 3     4 5
      step 1   6       7       8 9              step 1   6 7     8 9     10 11 12
               a tail of 4 is a step of its own          a tail of 1 cannot feed 3 ranks: it joins
                                                         the step before it

Shares of one step differ by at most one sample; `share_weight` is what a rank's mean gradient must
be multiplied by so that the average over ranks is the mean over all samples of the step.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace

from farandole.errors import UserError


@dataclass(frozen=True)
class Shares:
    """The cut of `count` samples over `size` ranks in steps of `global_batch` samples."""

    count: int
    size: int
    global_batch: int
    drop_last: bool = False

    def __post_init__(self) -> None:
        if self.global_batch < self.size:
            raise UserError(
                f"a global batch of {self.global_batch} cannot be shared by {self.size} workers. "
                f"Use global_batch_size >= {self.size}, or fewer workers."
            )
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
    def steps(self) -> int:
        """Steps in an epoch, the same for every rank."""
        whole = self.count // self.global_batch
        tail_is_step = self._tail > 0 and (self._tail >= self.size or whole == 0)
        return whole + (tail_is_step and not self.drop_last)

    @property
    def dropped(self) -> int:
        """Samples that an epoch leaves out; 0 unless `drop_last`."""
        return self._tail if self.drop_last else 0

    @property
    def joined(self) -> int:
        """Samples of a tail that is too short for all ranks, and so belongs to the step before."""
        whole = self.count // self.global_batch
        return 0 if self.drop_last or not whole or self._tail >= self.size else self._tail

    def after(self, done: int) -> Shares | None:
        """The cut of what is left once `done` samples are used; None when that makes no step.

        Resuming needs it: `done` may lie anywhere when the run was saved on other numbers.
        """
        left = self.count - done
        if left < (self.global_batch if self.drop_last else self.size):
            return None
        return replace(self, count=left)

    def global_range(self, step: int) -> range:
        """Positions in the epoch's order that all ranks together take in `step`."""
        start = step * self.global_batch
        if step == self.steps - 1:
            return range(start, self.count - self.dropped)
        return range(start, start + self.global_batch)

    def share(self, step: int, rank: int) -> range:
        """The part of `global_range(step)` that `rank` takes; never empty."""
        whole = self.global_range(step)
        return whole[share_slice(len(whole), self.size, rank)]

    def share_weight(self, step: int, rank: int) -> float:
        """`rank`'s number of samples over the average number of samples per rank."""
        return len(self.share(step, rank)) * self.size / len(self.global_range(step))


def share_slice(length: int, size: int, rank: int) -> slice:
    """`rank`'s part of `length` items cut into `size` parts that differ by at most one item."""
    return slice(rank * length // size, (rank + 1) * length // size)


def note_of_joined_tail(shares: Shares) -> str:
    """For training with a batch over all workers whose steps are not quite those of one worker:
    says so, with a batch nearby whose steps are."""
    count, size, batch = shares.count, shares.size, shares.global_batch
    near = sorted(range(size, 2 * batch + size), key=lambda other: abs(other - batch))
    fitting = next((b for b in near if not replace(shares, global_batch=b).joined), count)
    few = f"at most {shares.joined} worker{'s' if shares.joined > 1 else ''}"
    return (
        f"note: {count} samples in global batches of {batch} leave {shares.joined} for the last "
        f"step, which {size} workers cannot share: it joins the step before. One worker takes a "
        f"step more. For the steps of one worker use global_batch_size={fitting}, drop_last=True "
        f"or {few}."
    )


def warn_of_rest(left: int, size: int) -> None:
    """Says that a resumed epoch ends early: only after resuming on more workers than before."""
    if left > 0:
        warnings.warn(
            f"the {left} sample(s) left of the resumed epoch cannot be shared by {size} workers; "
            "this epoch leaves them out.",
            stacklevel=3,
        )
