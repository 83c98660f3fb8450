"""PipeDream: one forward, one backward, an update after every minibatch, and never a flush.

    rank 0   F0 F1 F2       B0|F3 B1|F4 B2|…      depth 2: F3 uses version 1
    rank 1      F0 F1    B0|F2 B1|F3 B2|F4 …      depth 1: F3 uses version 2
    rank 2         F0 B0|F1 B1|F2 B2|F3 B3|…      depth 0: F3 uses version 3; | is an update

Weights change between a forward and its backward, so each action says which version it uses. With
stashing a backward uses the version of its forward. Without, it uses the newest, and the gradient
is of no function at all. With vertical sync all stages use the version that the first one used.

A stage with r ranks does r minibatches in a round, one on each rank, and one update for all of
them, in which its ranks meet.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from farandole.schedule.pipelines.actions import Action, backward, forward, update
from farandole.schedule.pipelines.placement import depth
from farandole.schedule.pipelines.streams import Stream


@dataclass(frozen=True)
class PipeDream(Stream):
    """A minibatch is one micro-batch, and its number that of the step call."""

    vertical: bool
    stash: bool

    def turn(self, rank: int, k: int) -> tuple[Action, ...]:
        stage, index, count = self.place(rank)
        this_round, whose = divmod(k, count)
        if whose != index:
            return ()
        done = forward(stage, k, version=self._forward_version(stage, this_round))
        ripe = this_round - depth(self.homes[0], stage)
        return (done, *self._end(stage, index, ripe)) if ripe >= 0 else (done,)

    def drain(self, rank: int, n: int) -> tuple[Action, ...]:
        stage, index, count = self.place(rank)
        own = len(range(index, n, count))
        rounds = -(-n // count)
        actions: list[Action] = []
        for ripe in range(max(0, own - depth(self.homes[0], stage)), rounds):
            ended = self._end(stage, index, ripe)
            # The last round may lack a minibatch for this rank; the others still meet it.
            actions += ended if ripe < own else list(ended)[-1:]
        return tuple(actions)

    def _end(self, stage: int, index: int, ripe: int) -> Iterator[Action]:
        """The backward of a round on the rank with this index, and the round's update."""
        # Without a stash the newest version: when the backward of round `ripe` begins, there have
        # been exactly `ripe` updates.
        version = self._forward_version(stage, ripe) if self.stash else ripe
        yield backward(stage, ripe * len(self.homes[0][stage]) + index, version=version)
        yield update(ripe + 1)

    def _forward_version(self, stage: int, this_round: int) -> int:
        """The updates before it; a round ends `depth` rounds after its forwards."""
        return max(0, this_round - depth(self.homes[0], 0 if self.vertical else stage))
