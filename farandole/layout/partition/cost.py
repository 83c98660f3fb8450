"""What a stage costs: the blocks `first` to `stop`, on some ranks that take turns.

    seconds of a stage = max(compute / ranks,                  its share of the batches
                             all-reduce of its weights,        2(r−1)/r · weights / bandwidth
                             handing over at its two ends)     2 · activations / bandwidth

This is PipeDream's model: computing, averaging and handing over all go on at the same time, so the
slowest of them sets the pace of the stage, and the slowest stage that of the pipeline.

Memory of a rank = weights × copies + what autograd saves × batches in flight.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from itertools import accumulate
from typing import NamedTuple

from farandole.layout.partition.network import Network

PerRank = Callable[[int, int], int]
"""A number from (ranks of this stage and all after it, ranks of this stage)."""


class BlockProfile(NamedTuple):
    """What one block needs for one (micro-)batch."""

    name: str
    forward_seconds: float
    backward_seconds: float
    output_bytes: int  # of what travels on
    saved_bytes: int  # what autograd keeps for the backward, beside the parameters
    parameter_bytes: int
    shared_bytes: int = 0  # of the saved ones, those that the block before saves too


class StagePlan(NamedTuple):
    """The blocks `first` to `stop` on `replicas` ranks, and what that costs by (micro-)batch."""

    first: int
    stop: int
    replicas: int
    compute_seconds: float  # of one batch; the ranks take turns
    sync_seconds: float
    boundary_seconds: float  # of the slower of its two ends
    memory_bytes: int  # of each of its ranks

    @property
    def seconds(self) -> float:
        """How far apart two batches leave the stage."""
        return max(self.compute_seconds / self.replicas, self.sync_seconds, self.boundary_seconds)


class Cut(NamedTuple):
    """A model cut into stages."""

    stages: tuple[StagePlan, ...]

    @property
    def bottleneck_seconds(self) -> float:
        return max(stage.seconds for stage in self.stages)

    @property
    def balance(self) -> tuple[int, ...]:
        """The number of blocks of each stage."""
        return tuple(stage.stop - stage.first for stage in self.stages)

    @property
    def replicas(self) -> tuple[int, ...]:
        """The number of ranks of each stage."""
        return tuple(stage.replicas for stage in self.stages)


def usual_in_flight(ranks_from_here: int, own: int) -> int:
    """Batches between a forward and its backward, one forward one backward in turn."""
    return math.ceil(ranks_from_here / own)


def usual_weight_copies(ranks_from_here: int, own: int) -> int:
    """One for each batch in flight, as PipeDream stashes them; the gradient; the optimizer's."""
    return usual_in_flight(ranks_from_here, own) + 2


class Costs:
    """Answers what any stage of a model costs."""

    def __init__(
        self,
        profiles: Sequence[BlockProfile],
        ranks: int,
        network: Network,
        *,
        in_flight: PerRank | None = None,
        weight_copies: PerRank | None = None,
        batches_per_sync: int = 1,
    ) -> None:
        self.profiles = profiles
        self.ranks = ranks
        self._handing = cache(network.handing)
        self._averaging = cache(network.averaging)
        self._in_flight = in_flight or usual_in_flight
        self._weight_copies = weight_copies or usual_weight_copies
        self._batches_per_sync = batches_per_sync
        # Sums over all blocks before each one, so that a stage is one subtraction.
        seconds = (block.forward_seconds + block.backward_seconds for block in profiles)
        self._seconds = list(accumulate(seconds, initial=0.0))
        self._weights = _sums(block.parameter_bytes for block in profiles)
        self._saved = _sums(block.saved_bytes - block.shared_bytes for block in profiles)

    def compute_seconds(self, first: int, stop: int) -> float:
        return self._seconds[stop] - self._seconds[first]

    def stage(self, first: int, stop: int, ranks_from_here: int, replicas: int) -> StagePlan:
        begin = self.ranks - ranks_from_here
        end = begin + replicas
        weights = self._weights[stop] - self._weights[first]
        sync = self._averaging(begin, end).of(weights) if replicas > 1 else 0.0
        boundary = 0.0
        if first > 0:
            size = self.profiles[first - 1].output_bytes
            boundary = self._handing(begin - 1, end).of(size)
        if stop < len(self.profiles):
            size = self.profiles[stop - 1].output_bytes
            boundary = max(boundary, self._handing(begin, end + 1).of(size))
        # Nobody before the stage has saved for it what its first block saves.
        saved = self._saved[stop] - self._saved[first] + self.profiles[first].shared_bytes
        # By the ranks from here to the end: the earlier a stage, the more batches are under way
        # behind it.
        copies = self._weight_copies(ranks_from_here, replicas)
        return StagePlan(
            first,
            stop,
            replicas,
            self.compute_seconds(first, stop),
            sync / self._batches_per_sync,
            boundary,
            weights * copies + saved * self._in_flight(ranks_from_here, replicas),
        )


def _sums(values: Iterable[int]) -> list[int]:
    return list(accumulate(values, initial=0))
