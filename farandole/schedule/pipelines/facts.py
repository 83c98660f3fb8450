"""What a pipeline makes each rank hold: activations and versions of the weights, at the peak.

    rank 0 of 3, 1F1B     F0 F1 F2 B0 F3 B1 F4 B2 B3 B4
    activations held       1  2  3  3  3  3  3  3  2  1     peak 3

An activation is held from its forward until its backward has ended, or until W where the backward
comes in two halves. A version is held while it is the newest, and as long as something will use it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from farandole.errors import UserError
from farandole.schedule.pipelines.actions import Action, Pipeline


@dataclass(frozen=True)
class Facts:
    """By rank, at the peak."""

    activations: tuple[int, ...]  # of a stage and a micro-batch, held at once
    versions: tuple[int, ...]  # of the weights


def facts(pipeline: Pipeline) -> Facts:
    ones = (1.0,) * pipeline.stages
    return Facts(
        tuple(int(max(_activations(each, ones), default=0)) for each in pipeline.actions),
        tuple(max(_versions(each), default=1) for each in pipeline.actions),
    )


def peak_bytes(
    pipeline: Pipeline, activation_bytes: Sequence[float], weight_bytes: Sequence[float]
) -> list[float]:
    """By rank, the most that activations and weights take together; both are given by stage."""
    for name, given in (("activation_bytes", activation_bytes), ("weight_bytes", weight_bytes)):
        if len(given) != pipeline.stages:
            raise UserError(f"{name}: {len(given)} numbers for {pipeline.stages} stages.")
    peaks = []
    for rank, actions in enumerate(pipeline.actions):
        weights = sum(weight_bytes[stage] for stage in pipeline.held(rank))
        over_time = zip(_activations(actions, activation_bytes), _versions(actions), strict=True)
        peaks.append(max((held + weights * count for held, count in over_time), default=weights))
    return peaks


def _activations(actions: Sequence[Action], size: Sequence[float]) -> list[float]:
    """What is held during each action."""
    change = [0.0] * (len(actions) + 1)
    for position, action in enumerate(actions):
        if action.kind == "F":
            change[position] += size[action.stage]
        elif action.kind in ("B", "W"):
            change[position + 1] -= size[action.stage]
    return list(accumulate(change[:-1]))


def _versions(actions: Sequence[Action]) -> list[int]:
    """How many versions of the weights there are during each action."""
    made = {0: 0}  # when each version came
    last_use = {0: 0}
    for position, action in enumerate(actions):
        if action.kind == "U":
            made[action.version] = position
        last_use[action.version] = position
    change = [0] * (len(actions) + 1)
    for version, begin in made.items():
        # The newest version is held even if nobody uses it any more: the next update starts from
        # it.
        end = max(last_use[version] + 1, made.get(version + 1, len(actions)))
        change[begin] += 1
        change[min(end, len(actions))] -= 1
    return list(accumulate(change[:-1]))
