"""What a rank's updates have to do with other ranks of its pipeline: found from who holds what."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn

from farandole.comm import Group
from farandole.errors import UserError
from farandole.layout.pipeline.gradient_bridge import GradientBridge
from farandole.layout.pipeline.update import GradientGroups, Tie
from farandole.layout.tile_groups import TileGroups
from farandole.schedule.pipelines import Pipeline


class StagePlacement(NamedTuple):
    """Which stages each place of the schedule holds, and which ranks sit there."""

    places: Pipeline
    tile_groups: TileGroups


class Use(NamedTuple):
    """A tensor of the model: its name there, and the stages that use it."""

    name: str
    stages: tuple[int, ...]


def uses(model: nn.Module, modules: Mapping[int, nn.Module]) -> dict[int, Use]:
    """For every tensor of the model, by its identity; `modules` are all stages of the model.

    Raises `UserError` for statistics that two stages would keep apart.
    """
    stages: dict[int, list[int]] = {}
    for stage, module in modules.items():
        for tensor in _distinct(module):
            stages.setdefault(id(tensor), []).append(stage)
    buffers = {id(buffer) for buffer in model.buffers()}
    result = {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        found = tuple(stages.get(id(tensor), ()))
        if id(tensor) in buffers and len(found) > 1:
            raise UserError(
                f"stages {found} share {name!r}, which changes in the forward pass: each would "
                "have its own. Put the blocks that use it into one stage with balance=…"
            )
        result[id(tensor)] = Use(name, found)
    return result


def unused(model: nn.Module, tensors: Mapping[int, Use]) -> list[torch.Tensor]:
    """What a checkpoint of the whole model holds and no stage uses."""
    found = {id(each): each for each in model.state_dict(keep_vars=True).values()}
    return [each for key, each in found.items() if key in tensors and not tensors[key].stages]


def _distinct(module: nn.Module) -> list[torch.Tensor]:
    return [*module.parameters(), *module.buffers()]


def find_gradient_groups(
    placement: StagePlacement, pipe: Group, bridge: GradientBridge, tensors: Mapping[int, Use]
) -> GradientGroups:
    """*Together*: makes the groups that it takes."""
    places, tile_groups = placement
    held = places.held(tile_groups.place(pipe.rank))
    alike = _ranks(placement, held[:1])
    # In two directions, rank r holds the stages r and p − 1 − r, and its mirror rank holds the same
    # two. So the ranks that share one stage share all of them, and one group adds up both.
    assert all(_ranks(placement, [stage]) == alike for stage in held)
    holders = pipe.subgroup(alike) if len(alike) > 1 else None
    counted: list[nn.Parameter] = []
    ties: dict[tuple[int, ...], list[nn.Parameter]] = {}
    # By their names, for ranks may meet the same tied weights in another order.
    for weight in sorted(bridge.trained(), key=lambda weight: _name(tensors, weight)):
        use = tensors.get(id(weight))
        ranks = alike if use is None else _ranks(placement, use.stages)
        # Invariant: every weight is counted by exactly one rank of the pipeline, so that the norm
        # over all stages contains it once, however many ranks hold it.
        if use is not None and owner(placement, use) == pipe.rank:
            counted.append(weight)
        if ranks != alike:
            ties.setdefault(ranks, []).append(weight)
    # In one order on all ranks, so that no two wait for each other in a circle.
    made = [
        Tie(pipe.subgroup(ranks), ties[ranks], 1.0 / len(alike))
        for ranks in sorted(_tied_ranks(placement, tensors))
        if ranks in ties
    ]
    return GradientGroups(pipe, holders, made, counted)


def owner(placement: StagePlacement, use: Use) -> int:
    """The rank that stands for all that hold a tensor: where it counts, and who saves it."""
    return _ranks(placement, use.stages)[0] if use.stages else 0


def _tied_ranks(placement: StagePlacement, tensors: Mapping[int, Use]) -> set[tuple[int, ...]]:
    return {_ranks(placement, use.stages) for use in tensors.values() if len(use.stages) > 1}


def _name(tensors: Mapping[int, Use], weight: nn.Parameter) -> str:
    use = tensors.get(id(weight))
    return "" if use is None else use.name


def _ranks(placement: StagePlacement, stages: Sequence[int]) -> tuple[int, ...]:
    """All ranks that hold one of these stages, in order."""
    places, tile_groups = placement
    return tile_groups.all_of(
        sorted({place for stage in stages for place in places.holders(stage)})
    )


def refuse_ties(tensors: Mapping[int, Use], schedule: str) -> None:
    """A stream updates stage by stage: a weight of two of them would come apart."""
    for use in tensors.values():
        if len(use.stages) > 1:
            raise UserError(
                f"{schedule} updates every stage at another time, and {use.name!r} belongs to "
                f"stages {use.stages}. Put them into one stage with balance=…, or take 1f1b."
            )
