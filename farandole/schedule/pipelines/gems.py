"""GEMS: two copies of the model in opposite directions, so that one begins where the other ends.

    MAST: two micro-batches; f and b are those of the second direction, | is the update

    rank 0   F0                   B0--- f1 b1---            |
    rank 1      F0          B0--- f1             b1---|
    rank 2         F0 B0--- f1                         b1---|

Rank 2 is the last of the first direction and the first of the second one. It is free early and
begins. MASTER repeats the two directions k times before the update: memory for the activations of
one part, a batch of 2k of them.
"""

from __future__ import annotations

from collections.abc import Iterator

from farandole.schedule.pieces import piece
from farandole.schedule.pipelines.actions import Action, Pipeline, opposite, update
from farandole.schedule.pipelines.flushed import ORDERS


def gems(base: str, stages: int, micros: int, pairs: int) -> Pipeline:
    """The micro-batches in 2 × `pairs` parts, down and up in turn, each by the scheme `base`."""
    actions = tuple(
        (*_order(base, rank, stages, micros, pairs), update(1)) for rank in range(stages)
    )
    return Pipeline(f"gems of {base}", micros, opposite(stages), actions)


def _order(base: str, rank: int, stages: int, micros: int, pairs: int) -> Iterator[Action]:
    # Every rank takes the parts in this order. So a part waits for itself and for earlier parts
    # only, and the two directions cannot lock each other up.
    for part in range(2 * pairs):
        direction = part % 2
        stage = rank if direction == 0 else stages - 1 - rank
        for kind, micro in ORDERS[base](piece(part, 2 * pairs, micros), stages - 1 - stage):
            yield Action(kind, stage, micro, direction)
