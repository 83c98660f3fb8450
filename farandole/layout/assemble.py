"""From a model and a layout to a pipeline at work: the whole order of it in one function."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import nn

from farandole.comm import Group
from farandole.comm.mail import Mail
from farandole.errors import UserError
from farandole.layout.blocks import Block
from farandole.layout.deferred import defer_statistics
from farandole.layout.ends import find_ends, owner, refuse_ties, unused, uses
from farandole.layout.gate import Gate
from farandole.layout.layout import Layout
from farandole.layout.part import Part, names_in, release
from farandole.layout.pipelined import Pipelined
from farandole.layout.scaling import LossScale
from farandole.layout.stage import LossFunction, Stage
from farandole.layout.update import Update
from farandole.layout.versions import Latest, Stash, Weights
from farandole.schedule.pipelines import Pipeline, facts


class Numbers(NamedTuple):
    """How a pipeline computes."""

    seed: int
    device: torch.device
    precision: torch.dtype | None = None  # of what autocast lowers
    clip: float | None = None  # the largest norm that a gradient may have


class Assembled(NamedTuple):
    """A rank's part of a pipeline, before a strategy has seen it."""

    pipelined: Pipelined
    gate: Gate
    names: dict[str, str]  # of the gate's tensors: their names in the whole model
    owned: set[str]  # of these, what no other rank of the pipeline need save


def assemble(
    model: nn.Module,
    blocks: Sequence[Block],
    layout: Layout,
    pipe: Group,
    loss: LossFunction,
    numbers: Numbers,
    first_rank: int = 0,
) -> Assembled:
    """*Together*, all ranks of a pipeline. `layout` has a balance. Takes the model apart.

    `first_rank`: what the first rank of the pipeline is called in messages.
    """
    places = layout.stream().unroll(1) if layout.streams else layout.pipeline()
    parts = cut(blocks, layout.balance)
    tensors = uses(model, parts)
    if layout.streams:
        refuse_ties(tensors, layout.schedule)
    held = {stage: parts[stage] for stage in places.held(pipe.rank)}
    gate = Gate(held, unused(model, tensors) if pipe.rank == 0 else ())
    names = names_in(model, gate)
    release(model, gate)
    for part in held.values():
        part.to(numbers.device)
        if layout.batchnorm == "deferred":
            defer_statistics(part)
    gate.to(numbers.device)
    ends = find_ends(places, pipe, gate, tensors)
    scale = LossScale(pipe) if numbers.precision is torch.float16 else None
    update = Update(gate, ends, averages=layout.streams, clip=numbers.clip, scale=scale)
    kinds = _weights(layout, pipe.rank)
    last = places.stages - 1
    stages = {
        stage: Stage(
            stage,
            kinds(part),
            loss if stage == last else None,
            recompute=layout.recompute,
            lowered=_lowered(numbers),
        )
        for stage, part in held.items()
    }

    def name_of(rank: int) -> str:
        return f"rank {first_rank + rank} (stage {'+'.join(map(str, places.held(rank)))})"

    mail = Mail(pipe, routes(places), numbers.device, name_of)
    pipelined = Pipelined(
        layout,
        pipe,
        stages,
        mail,
        update,
        seed=numbers.seed,
        scale=scale,
        name=f"rank {first_rank + pipe.rank}",
    )
    owned = {use.name for use in tensors.values() if owner(places, use) == pipe.rank}
    return Assembled(pipelined, gate, names, owned)


def cut(blocks: Sequence[Block], balance: Sequence[int]) -> dict[int, Part]:
    """All stages of the model. Raises `UserError` when they are not as many as the blocks."""
    if sum(balance) != len(blocks):
        raise UserError(
            f"balance={'+'.join(map(str, balance))} makes {sum(balance)} blocks, and the model has "
            f"{len(blocks)}: {', '.join(block.name for block in blocks)}."
        )
    first, parts = 0, {}
    for stage, count in enumerate(balance):
        parts[stage] = Part(blocks[first : first + count], first)
        first += count
    return parts


def routes(places: Pipeline) -> set[tuple[int, int]]:
    """Who sends to whom: neighbours, in both directions."""
    pairs = set()
    for replica, homes in enumerate(places.homes):
        for stage in range(places.stages - 1):
            for micro in range(math.lcm(len(homes[stage]), len(homes[stage + 1]))):
                here = places.home(stage, micro, replica)
                there = places.home(stage + 1, micro, replica)
                pairs |= {(here, there), (there, here)}
    return pairs


def _weights(layout: Layout, rank: int) -> Callable[[Part], Weights]:
    """How many versions of its weights a rank must be able to hold."""
    if not layout.streams:
        return Weights
    if not layout.stash:
        return Latest
    steady = layout.stream().unroll(4 * layout.ranks)
    if facts(steady).versions[rank] == 1:
        return Weights
    behind, newest = 0, 0
    for action in steady.actions[rank]:
        if action.kind == "U":
            newest = action.version
        elif action.kind == "F":
            behind = max(behind, newest - action.version)
    return lambda part: Stash(part, behind)


def _lowered(numbers: Numbers) -> Callable[[], AbstractContextManager[object]]:
    if numbers.precision is None:
        return nullcontext
    return lambda: torch.autocast(numbers.device.type, numbers.precision)
