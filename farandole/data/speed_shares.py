"""`shares="speed"`: slower workers get fewer samples of each step.

Every worker measures how many samples it gets through in a second of its own: loading and
computing, without what it waits for other workers. After 10 steps, then after 40, 160, … more, and
when an epoch begins, all tell each other. From the same numbers all compute the same quotas. What
is left of the epoch is dealt by these; which samples make a step does not change, and each gradient
counts by its number of samples. So the steps are those of equal shares, and only take less time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final

import torch

from farandole.comm import Group
from farandole.data.options import LoaderOptions
from farandole.data.position import Position
from farandole.data.shares import part_of

FIRST_STEPS: Final = 10
_MORE_STEPS: Final = 4  # times as many before the next time
_WORTH: Final = 1.05  # how much sooner a step must end, or the shares stay as they are


def quotas(speeds: Sequence[float], global_batch: int) -> tuple[int, ...]:
    """Samples of a full step by rank: at least one each, so that the last is done earliest."""
    total = sum(speeds)
    found = [max(1, int(global_batch * speed / total)) for speed in speeds]
    while (left := global_batch - sum(found)) != 0:
        ranks = range(len(found))
        if left > 0:
            found[min(ranks, key=lambda rank: ((found[rank] + 1) / speeds[rank], rank))] += 1
        else:
            several = [rank for rank in ranks if found[rank] > 1]
            found[max(several, key=lambda rank: (found[rank] / speeds[rank], -rank))] -= 1
    return tuple(found)


def is_worth_it(speeds: Sequence[float], before: Sequence[int], after: Sequence[int]) -> bool:
    """Whether steps would end so much sooner that dealing anew is worth its time."""
    slowest = [
        max(count / speed for count, speed in zip(counts, speeds, strict=True))
        for counts in (before, after)
    ]
    return slowest[0] >= _WORTH * slowest[1]


class SpeedMeasure:
    """This worker's speed since all told each other theirs. Counts steps as all workers do."""

    def __init__(self, waited: Callable[[], float], settle: Callable[[], None]) -> None:
        """`waited`: seconds so far for other workers. `settle` waits for the device."""
        self._waited = waited
        self._settle = settle
        self._interval = FIRST_STEPS
        self._began: float | None = None
        self._skips = True
        self._forget()

    def _forget(self) -> None:
        self._steps, self._measured = 0, 0
        self._seconds, self._samples = 0.0, 0.0

    def _now(self) -> float:
        return time.perf_counter() - self._waited()

    def begin_dealing(self) -> None:
        """Its first step is not measured: processes start for it, and memory is allocated."""
        self._skips = True
        self.begin_step()

    def begin_step(self) -> None:
        if self._measured == 0:
            self._settle()
        self._began = self._now()

    def end_step(self, samples: float, readers: int) -> None:
        """Not of a step whose samples several workers read: nobody reads them for another."""
        assert self._began is not None
        self._steps += 1
        if self._skips or readers > 1:
            self._skips = False
            return
        self._measured += 1
        self._seconds += self._now() - self._began
        self._samples += samples

    @property
    def is_due(self) -> bool:
        return self._steps >= self._interval and self._measured > 0

    @property
    def has_measured(self) -> bool:
        return self._measured > 0

    def take(self) -> float:
        """Samples in a second; what follows is measured anew."""
        began = self._now()
        self._settle()
        speed = self._samples / max(1e-9, self._seconds + self._now() - began)
        if self._steps >= self._interval:
            self._interval *= _MORE_STEPS
        self._forget()
        return speed


class SpeedShares:
    """What the ranks of a loader measure, agree on, and share by. The speeds that they agreed on
    are part of the position, and so of a checkpoint."""

    def __init__(
        self,
        position: Position,
        options: LoaderOptions,
        group: Group,
        device: torch.device,
        on_change: Callable[[Sequence[int], Sequence[float]], None],
    ) -> None:
        """`on_change` is told the samples of a full step by rank, and their speeds."""
        self._position = position
        self._options = options
        self._group = group
        self._device = device
        self._on_change = on_change
        self.measure = SpeedMeasure(lambda: group.meter.waited_seconds, self._settle)

    def quotas(self, size: int) -> tuple[int, ...]:
        """Of a full step by rank; none as long as these ranks have not been measured."""
        speeds = self._position.speeds
        return quotas(speeds, self._options.global_batch(size)) if len(speeds) == size else ()

    def agree(self) -> bool:
        """*Together.* Returns whether shares have changed."""
        size = self._group.size
        told = [float(each) for each in self._group.gather_json(self.measure.take())]
        whole, now = self._options.global_batch(size), self.quotas(size)
        before = [part_of(whole, size, rank, whole, now) for rank in range(size)]
        after = quotas(told, whole)
        if not is_worth_it(told, [part.stop - part.start for part in before], after):
            return False
        self._position.speeds = told
        self._on_change(after, told)
        return True

    def _settle(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
