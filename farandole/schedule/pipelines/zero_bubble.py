"""Zero-bubble (ZB-H1): the backward in two halves, and the half nobody waits for fills the gaps.

    rank 0   F0 F1 F2       I0 W0 F3 I1 W1 I2 W2 I3 W3
    rank 1      F0 F1    I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
    rank 2         F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3

I is the gradient of the input, which the stage before waits for. W is the gradient of the weights,
which only the update needs. Rank r puts off r of its Ws and does them at the end, where 1F1B would
wait. Activations are held until W, so all ranks hold as many as rank 0 does under 1F1B, not more.
"""

from __future__ import annotations

from collections.abc import Iterator

from farandole.schedule.pipelines.actions import Action, Pipeline, one_each, update
from farandole.schedule.pipelines.orders import Turn, one_forward_one_backward


def zero_bubble(stages: int, micros: int) -> Pipeline:
    """Stage s on rank s."""
    actions = tuple(
        (
            *(Action(kind, rank, micro) for kind, micro in _order(rank, stages, micros)),
            update(1),
        )
        for rank in range(stages)
    )
    return Pipeline("zero-bubble", micros, (one_each(stages),), actions)


def _order(rank: int, stages: int, micros: int) -> Iterator[Turn]:
    """1F1B with I in place of B, each followed by the W of `rank` micro-batches before."""
    for kind, micro in one_forward_one_backward(range(micros), stages - 1 - rank):
        if kind == "F":
            yield "F", micro
            continue
        yield "I", micro
        # Invariant: every W follows its own I, by exactly `rank` micro-batches; what is put off at
        # the end is done below. So no more activations are held than rank 0 holds.
        if micro >= rank:
            yield "W", micro - rank
    for micro in range(max(0, micros - rank), micros):
        yield "W", micro
