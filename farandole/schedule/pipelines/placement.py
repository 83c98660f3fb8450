"""On which ranks the stages sit when a stage may have several, and how far ahead each must be.

    replicas 2, 1, 1     stage 0 on ranks 0 and 1, stage 1 on rank 2, stage 2 on rank 3
                         micro-batches 0, 2, 4, … on rank 0, and 1, 3, 5, … on rank 1

PipeDream calls this 1F1B-RR. A slow stage on two ranks keeps up with its neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from farandole.errors import UserError

Homes = tuple[tuple[int, ...], ...]
"""By stage, the ranks that hold it and take turns."""


def in_a_row(stages: int, replicas: Sequence[int] = ()) -> Homes:
    """Ranks numbered stage by stage; without `replicas`, one for each."""
    counts = tuple(replicas) or (1,) * stages
    if len(counts) != stages or min(counts) < 1:
        raise UserError(
            f"replicas {'+'.join(map(str, counts))}: give one number, at least 1, for each of the "
            f"{stages} stages."
        )
    return tuple(tuple(range(first, stop)) for first, stop in pairwise(accumulate((0, *counts))))


def depth(homes: Homes, stage: int) -> int:
    """Forwards that a rank of `stage` is ahead of its backwards: enough to keep all ranks after it
    busy, shared with the others of its stage and rounded up.

    The stages before then always send a micro-batch before they wait for the gradient of one that
    a stage after cannot have yet. With r ranks on this stage, a after it, and r' on the next one,
    the ranks here are r·depth ≥ a micro-batches ahead, and those there at most (a − r') + r' − 1.
    """
    after = sum(len(ranks) for ranks in homes[stage + 1 :])
    return -(-after // len(homes[stage]))
