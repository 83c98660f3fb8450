"""PipeDream-2BW: no flush, an update for every m micro-batches, and two versions of the weights.

    2 stages, m = 2; | is an update

    rank 0   F0 F1    B0 F2 B1|F3 B2 F4 B3|F5 B4 …     depth 1
    rank 1      F0 B0 F1 B1|F2 B2 F3 B3|F4 B4 F5 …     depth 0

Batch k uses version max(0, k − 1), on all stages, forward and backward: F0 … F3 use version 0, and
F4 version 1. The newest version may not be on every stage when a batch begins; the one before is.
So W(k + 1) = W(k) − step(gradient at W(k − 1)), no other version is used again, and two suffice.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from farandole.schedule.pipelines.actions import Action, backward, forward, update
from farandole.schedule.pipelines.placement import depth
from farandole.schedule.pipelines.streams import Stream


@dataclass(frozen=True)
class TwoVersions(Stream):
    """`micros` micro-batches, at least as many as stages, for each update."""

    def turn(self, rank: int, k: int) -> tuple[Action, ...]:
        stage, ahead = rank, depth(self.homes[0], rank)
        actions: list[Action] = []
        for micro in range(k * self.micros, (k + 1) * self.micros):
            actions.append(forward(stage, micro, version=self._version(micro)))
            if micro >= ahead:
                actions += self._end(stage, micro - ahead)
        return tuple(actions)

    def drain(self, rank: int, n: int) -> tuple[Action, ...]:
        stage, ahead, stop = rank, depth(self.homes[0], rank), n * self.micros
        pending = range(max(0, stop - ahead), stop)
        return tuple(action for micro in pending for action in self._end(stage, micro))

    def _end(self, stage: int, micro: int) -> Iterator[Action]:
        """The backward of a micro-batch, and the update if it was the last of its batch."""
        yield backward(stage, micro, version=self._version(micro))
        if (micro + 1) % self.micros == 0:
            yield update((micro + 1) // self.micros)

    def _version(self, micro: int) -> int:
        # The version of the batch before, which exists on every stage when this batch begins there:
        # with at least as many micro-batches as stages, a stage is less than one batch behind.
        return max(0, micro // self.micros - 1)
