"""From a model and a layout to a pipeline at work: the whole order of it in one function."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import nn

from farandole.comm import Group
from farandole.comm.p2p.mail import Mail
from farandole.errors import UserError, nearest
from farandole.layout.layout import Layout
from farandole.layout.objective import Objective
from farandole.layout.partition.blocks import Block
from farandole.layout.partition.part import Rerun, StageModule, names_in, release
from farandole.layout.pipeline.deferred import DeferredBatchNorm, defer_statistics
from farandole.layout.pipeline.gradient_bridge import GradientBridge
from farandole.layout.pipeline.gradient_groups import (
    Seats,
    find_ends,
    owner,
    refuse_ties,
    unused,
    uses,
)
from farandole.layout.pipeline.masked_means import MaskedMeans
from farandole.layout.pipeline.pipelined import Pipelined
from farandole.layout.pipeline.recompute import recomputed
from farandole.layout.pipeline.scaling import LossScale
from farandole.layout.pipeline.stage import Stage
from farandole.layout.pipeline.update import Update
from farandole.layout.pipeline.versions import Latest, Stash, Weights
from farandole.layout.pipeline.weight_hooks import WeightHooks
from farandole.layout.recording.forward_changes import ForwardChanges, reasons
from farandole.layout.teams import Teams
from farandole.layout.tiles.core.grid import Grid
from farandole.layout.tiles.core.lanes import Lanes, LocalLanes, MailLanes
from farandole.layout.tiles.core.tiling import Tiling
from farandole.schedule.pipelines import Pipeline, facts


class ComputeSettings(NamedTuple):
    """How a pipeline computes."""

    seed: int
    device: torch.device
    precision: torch.dtype | None = None  # of what autocast lowers
    clip: float | None = None  # the largest norm that a gradient may have


class Assembled(NamedTuple):
    """A rank's part of a pipeline, before a strategy has seen it."""

    pipelined: Pipelined
    gate: GradientBridge
    names: dict[str, str]  # of the gate's tensors: their names in the whole model
    owned: set[str]  # of these, what no other rank of the pipeline need save
    tilings: dict[int, Tiling]  # of this rank's stages; none: whole images


def assemble(
    model: nn.Module,
    blocks: Sequence[Block],
    layout: Layout,
    pipe: Group,
    objective: Objective,
    numbers: ComputeSettings,
    first_rank: int = 0,
    *,
    strict: bool = True,
) -> Assembled:
    """*Together*, all ranks of a pipeline. `layout` has a balance. Takes the model apart.

    `first_rank`: what the first rank of the pipeline is called in messages. `strict`: a forward
    that changes more than micro-batches, copies of stages or recomputing allow is refused.
    """
    places = layout.stream().unroll(1) if layout.streams else layout.pipeline()
    parts = cut(blocks, layout.balance)
    tensors = uses(model, parts)
    if layout.streams:
        refuse_ties(tensors, layout.schedule)
    teams = Teams(layout.teams)
    seats = Seats(places, teams)
    place = teams.place(pipe.rank)
    held = {stage: parts[stage] for stage in places.held(place)}
    layers = {module: name for name, module in model.named_modules() if name}
    if layout.handoff and layout.handoff not in layers.values():
        raise UserError(
            f"handoff: the model has no submodule {layout.handoff!r}. "
            f"{nearest(layout.handoff, layers.values())}"
        )
    gate = GradientBridge(held, unused(model, tensors) if pipe.rank == 0 else ())
    names = names_in(model, gate)
    release(model, gate)
    buffers = dict(gate.named_buffers())
    for part in held.values():
        part.to(numbers.device)
        if layout.batchnorm == "deferred":
            defer_statistics(part)
    gate.to(numbers.device)
    _follow(model, buffers, gate)
    ends = find_ends(seats, pipe, gate, tensors)
    scale = LossScale(pipe) if numbers.precision is torch.float16 else None
    hooks = WeightHooks(gate, names, whole=len(parts) == 1)
    update = Update(gate, ends, hooks, averages=layout.streams, clip=numbers.clip, scale=scale)

    def name_of(rank: int) -> str:
        stages = "+".join(map(str, places.held(teams.place(rank))))
        return f"rank {first_rank + rank} (stage {stages})"

    mail = Mail(pipe, routes(places, teams), numbers.device, name_of)
    lanes = _lanes(layout, teams, pipe.rank, mail)
    ends_at = _stage_of(layout.handoff, parts, layers)
    tilings = {} if lanes is None else _tilings(layout, held, lanes, layers, ends_at)
    for stage, part in held.items() if layout.recompute_blocks else ():
        part.rerun = _rerun(tilings.get(stage), offload=layout.offload)
        part.rerun_blocks = layout.recompute_blocks
    for part in held.values():
        part.runs_again, part.draws_alike = layout.recompute, lanes is not None
    kinds = _weights(layout, place)
    last = places.stages - 1
    means = _means(layout, objective)
    stages = {
        stage: Stage(
            stage,
            kinds(part),
            objective.of if stage == last else None,
            recompute=layout.recompute and not layout.recompute_blocks,
            offload=layout.offload,
            lowered=_lowered(numbers),
            tiling=tilings.get(stage),
            means=means,
            changes=_changes(layout, part, layers) if strict else None,
        )
        for stage, part in held.items()
    }
    pipelined = Pipelined(
        layout,
        pipe,
        stages,
        mail,
        update,
        objective,
        seed=numbers.seed,
        scale=scale,
        name=f"rank {first_rank + pipe.rank}",
        team=_team(teams, pipe),
        means=means,
    )
    owned = {use.name for use in tensors.values() if owner(seats, use) == pipe.rank}
    return Assembled(pipelined, gate, names, owned, tilings)


def _follow(model: nn.Module, before: Mapping[str, torch.Tensor], gate: GradientBridge) -> None:
    """A buffer that was moved is a new tensor. The script's model shall have it too, so that what a
    script writes to a buffer is what the stages read."""
    now = dict(gate.named_buffers())
    moved = {id(tensor): now[name] for name, tensor in before.items() if name in now}
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and id(buffer) in moved:
                module._buffers[name] = moved[id(buffer)]


def _changes(layout: Layout, part: StageModule, layers: Mapping[nn.Module, str]) -> ForwardChanges:
    of_buffers, of_attributes = reasons(
        microbatches=layout.microbatches,
        copies=layout.mirrored or max(layout.replicas, default=1) > 1,
        recomputes=layout.recompute,
    )
    return ForwardChanges(part, layers, of_buffers=of_buffers, of_attributes=of_attributes)


def _means(layout: Layout, objective: Objective) -> MaskedMeans | None:
    """Who looks at masked means, where micro-batches are weighed by their samples."""
    if layout.microbatches == 1 or layout.reduction != "mean" or objective.weight is not None:
        return None
    return MaskedMeans()


def cut(blocks: Sequence[Block], balance: Sequence[int]) -> dict[int, StageModule]:
    """All stages of the model. Raises `UserError` when they are not as many as the blocks."""
    if sum(balance) != len(blocks):
        raise UserError(
            f"balance={'+'.join(map(str, balance))} makes {sum(balance)} blocks, and the model has "
            f"{len(blocks)}: {', '.join(block.name for block in blocks)}."
        )
    first, parts = 0, {}
    for stage, count in enumerate(balance):
        parts[stage] = StageModule(blocks[first : first + count], first)
        first += count
    return parts


def _tilings(
    layout: Layout,
    held: Mapping[int, StageModule],
    lanes: Lanes,
    layers: Mapping[nn.Module, str],
    ends_at: int,
) -> dict[int, Tiling]:
    """One for each stage of a rank: they are at different layers at the same time.

    `ends_at`: the stage of the chosen hand-off. Behind it, what is left of tiles may end anywhere.
    """
    last_tiled = layout.tiled - 1 if layout.tiled and layout.tiled != layout.stages else None
    tilings = {}
    for stage, part in held.items():
        inside = set(part.modules())
        tilings[stage] = Tiling(
            lanes,
            {module: name for module, name in layers.items() if module in inside},
            chosen=layout.handoff if stage <= ends_at else "",
            gathers=stage == last_tiled,
        )
        tilings[stage].flow.overlap = layout.overlap
        for module in inside:
            if isinstance(module, DeferredBatchNorm):
                module.counted = tilings[stage].counted
    return tilings


def _stage_of(name: str, parts: Mapping[int, StageModule], layers: Mapping[nn.Module, str]) -> int:
    """The stage that has a layer; the last one if none has it as a module of its own."""
    for stage, part in parts.items():
        if any(layers.get(module) == name for module in part.modules()):
            return stage
    return len(parts) - 1


def _rerun(tiling: Tiling | None, *, offload: bool) -> Rerun:
    def rerun(run: Callable[[Any], Any], value: Any, module: nn.Module, late: bool) -> Any:
        again = run if tiling is None else tiling.repeatable(run)
        # What is needed again soon stays: the way to the host and back would take longer.
        return recomputed(
            again, value, module, offload=offload and late, to_the_end=tiling is not None
        )

    return rerun


def _lanes(layout: Layout, teams: Teams, rank: int, mail: Mail) -> Lanes | None:
    """The tiles of a rank's stages; None: it has none."""
    place = teams.place(rank)
    if layout.lanes == 1 or (layout.tiled and place >= layout.tiled):
        return None
    grid = Grid(layout.tiles, layout.channels)
    if layout.in_turn:
        return LocalLanes(grid)
    return MailLanes(grid, teams.lane(rank), mail, list(teams.members(place)))


def _team(teams: Teams, pipe: Group) -> Group | None:
    """*Together.* The ranks with the other tiles of this rank's stages."""
    place = teams.place(pipe.rank)
    return pipe.subgroup(teams.members(place)) if teams.sizes[place] > 1 else None


def routes(places: Pipeline, teams: Teams) -> set[tuple[int, int]]:
    """Who sends to whom: neighbours of one lane in both directions, and all lanes of a team."""
    pairs = {
        (one, other)
        for place in range(len(teams.sizes))
        for one in teams.members(place)
        for other in teams.members(place)
        if one != other
    }
    for replica, homes in enumerate(places.homes):
        for stage in range(places.stages - 1):
            for micro in range(math.lcm(len(homes[stage]), len(homes[stage + 1]))):
                here = places.home(stage, micro, replica)
                there = places.home(stage + 1, micro, replica)
                for lane in range(min(teams.sizes[here], teams.sizes[there])):
                    one, other = teams.rank(here, lane), teams.rank(there, lane)
                    assert one is not None
                    assert other is not None
                    pairs |= {(one, other), (other, one)}
    return pairs


def _weights(layout: Layout, rank: int) -> Callable[[StageModule], Weights]:
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


def _lowered(numbers: ComputeSettings) -> Callable[[], AbstractContextManager[object]]:
    if numbers.precision is None:
        return nullcontext
    return lambda: torch.autocast(numbers.device.type, numbers.precision)
