"""Builds a running pipeline from a model and a layout. `assemble` shows the whole order."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import nn

from farandole.comm import Group
from farandole.comm.p2p.mail import Mail
from farandole.errors import UserError
from farandole.layout.assemble_tiles import (
    check_handoff,
    make_tilings,
    shards_of,
    stage_of,
    tile_group_of,
)
from farandole.layout.layout import Layout
from farandole.layout.objective import Objective
from farandole.layout.option_groups import RecomputeOptions
from farandole.layout.partition.blocks import Block
from farandole.layout.partition.stage_module import Rerun, StageModule, names_in, release
from farandole.layout.pipeline.deferred import defer_statistics
from farandole.layout.pipeline.gradient_bridge import GradientBridge
from farandole.layout.pipeline.gradient_groups import (
    StagePlacement,
    find_gradient_groups,
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
from farandole.layout.recording.state.forward_changes import ForwardChanges, reasons
from farandole.layout.tile_groups import TileGroups
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
    bridge: GradientBridge
    names: dict[str, str]  # of the gradient bridge's tensors: their names in the whole model
    owned: set[str]  # of these, what no other rank of the pipeline need save
    tilings: dict[int, Tiling]  # of this rank's stages; none: whole images


def assemble(
    model: nn.Module,
    blocks: Sequence[Block],
    layout: Layout,
    pipe: Group,
    objective: Objective,
    settings: ComputeSettings,
    first_rank: int = 0,
    *,
    strict: bool = True,
) -> Assembled:
    """*Together*, all ranks of a pipeline. `layout` has a balance. Takes the model apart.

    `first_rank`: what the first rank of the pipeline is called in messages. `strict`: a forward
    that changes more than micro-batches, copies of stages or recomputing allow is refused.
    """
    places = layout.stream().unroll(1) if layout.streams else layout.pipeline()
    modules = cut(blocks, layout.balance)
    tensors = uses(model, modules)
    if layout.streams:
        refuse_ties(tensors, layout.schedule)
    tile_groups = TileGroups(layout.group_sizes)
    placement = StagePlacement(places, tile_groups)
    held = {stage: modules[stage] for stage in places.held(tile_groups.place(pipe.rank))}
    layers = {module: name for name, module in model.named_modules() if name}
    check_handoff(layout, layers)
    # Names are looked up before `release` and moves: both find tensors by identity, and buffers
    # become new tensors when they are moved.
    bridge = GradientBridge(held, unused(model, tensors) if pipe.rank == 0 else ())
    names = names_in(model, bridge)
    release(model, bridge)
    _move(model, bridge, held, layout, settings.device)
    groups = find_gradient_groups(placement, pipe, bridge, tensors)
    scale = LossScale(pipe) if settings.precision is torch.float16 else None
    hooks = WeightHooks(bridge, names, whole=len(modules) == 1)
    update = Update(bridge, groups, hooks, averages=layout.streams, clip=settings.clip, scale=scale)
    mail = _mail(placement, pipe, settings.device, first_rank)
    shards = shards_of(layout, tile_groups, pipe.rank, mail)
    handoff_stage = stage_of(layout.handoff, modules, layers)
    tilings = {} if shards is None else make_tilings(layout, held, shards, layers, handoff_stage)
    _set_up_recompute(layout, held, tilings, draws_alike=shards is not None)
    means = _means(layout, objective)
    computing = _Computing(layout, settings, objective, means, layers if strict else None)
    stages = _stages(computing, placement, pipe.rank, held, tilings)
    pipelined = Pipelined(
        layout,
        pipe,
        stages,
        mail,
        update,
        objective,
        seed=settings.seed,
        scale=scale,
        name=f"rank {first_rank + pipe.rank}",
        tile_group=tile_group_of(tile_groups, pipe),
        means=means,
    )
    owned = {use.name for use in tensors.values() if owner(placement, use) == pipe.rank}
    return Assembled(pipelined, bridge, names, owned, tilings)


def _move(
    model: nn.Module,
    bridge: GradientBridge,
    held: Mapping[int, StageModule],
    layout: Layout,
    device: torch.device,
) -> None:
    """Moves the stages to the device, before anything else refers to their tensors."""
    buffers = dict(bridge.named_buffers())
    for module in held.values():
        module.to(device)
        if layout.batchnorm == "deferred":
            defer_statistics(module)
    bridge.to(device)
    _follow(model, buffers, bridge)


def _mail(placement: StagePlacement, pipe: Group, device: torch.device, first_rank: int) -> Mail:
    places, tile_groups = placement

    def name_of(rank: int) -> str:
        stages = "+".join(map(str, places.held(tile_groups.place(rank))))
        return f"rank {first_rank + rank} (stage {stages})"

    return Mail(pipe, routes(places, tile_groups), device, name_of)


def _set_up_recompute(
    layout: RecomputeOptions,
    held: Mapping[int, StageModule],
    tilings: Mapping[int, Tiling],
    *,
    draws_alike: bool,
) -> None:
    """Tells the stages what runs again, and that it must draw the same random numbers then."""
    for stage, module in held.items():
        if layout.recompute_blocks:
            module.rerun = _rerun(tilings.get(stage), offload=layout.offload)
            module.rerun_blocks = layout.recompute_blocks
        module.runs_again, module.draws_alike = layout.recompute, draws_alike


class _Computing(NamedTuple):
    """What the stages of a rank have in common."""

    layout: Layout
    settings: ComputeSettings
    objective: Objective
    means: MaskedMeans | None
    layers: Mapping[nn.Module, str] | None  # None: a forward may change what it likes


def _stages(
    computing: _Computing,
    placement: StagePlacement,
    rank: int,
    held: Mapping[int, StageModule],
    tilings: Mapping[int, Tiling],
) -> dict[int, Stage]:
    layout, layers = computing.layout, computing.layers
    kinds = _weights(layout, placement.tile_groups.place(rank))
    last = placement.places.stages - 1
    return {
        stage: Stage(
            stage,
            kinds(module),
            computing.objective.of if stage == last else None,
            recompute=layout.recompute and not layout.recompute_blocks,
            offload=layout.offload,
            lowered=_lowered(computing.settings),
            tiling=tilings.get(stage),
            means=computing.means,
            changes=None if layers is None else _changes(layout, module, layers),
        )
        for stage, module in held.items()
    }


def _follow(model: nn.Module, before: Mapping[str, torch.Tensor], bridge: GradientBridge) -> None:
    """Gives the script's model the moved buffers, which are new tensors.

    A script that writes to a buffer then writes to what the stages read.
    """
    now = dict(bridge.named_buffers())
    moved = {id(tensor): now[name] for name, tensor in before.items() if name in now}
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and id(buffer) in moved:
                module._buffers[name] = moved[id(buffer)]


def _changes(
    layout: Layout, module: StageModule, layers: Mapping[nn.Module, str]
) -> ForwardChanges:
    of_buffers, of_attributes = reasons(
        microbatches=layout.microbatches,
        copies=layout.mirrored or max(layout.replicas, default=1) > 1,
        recomputes=layout.recompute,
    )
    return ForwardChanges(module, layers, of_buffers=of_buffers, of_attributes=of_attributes)


def _means(layout: Layout, objective: Objective) -> MaskedMeans | None:
    """Makes the check of masked means, where micro-batches are weighed by their samples."""
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
    first, modules = 0, {}
    for stage, count in enumerate(balance):
        modules[stage] = StageModule(blocks[first : first + count], first)
        first += count
    return modules


def _rerun(tiling: Tiling | None, *, offload: bool) -> Rerun:
    def rerun(run: Callable[[Any], Any], value: Any, module: nn.Module, late: bool) -> Any:
        again = run if tiling is None else tiling.repeatable(run)
        # What is needed again soon stays: the way to the host and back would take longer.
        return recomputed(
            again, value, module, offload=offload and late, to_the_end=tiling is not None
        )

    return rerun


def routes(places: Pipeline, tile_groups: TileGroups) -> set[tuple[int, int]]:
    """Who sends to whom: neighbours of one shard in both directions, and all shards of a tile
    group."""
    pairs = {
        (one, other)
        for place in range(len(tile_groups.sizes))
        for one in tile_groups.members(place)
        for other in tile_groups.members(place)
        if one != other
    }
    for direction, homes in enumerate(places.homes):
        for stage in range(places.stages - 1):
            for micro in range(math.lcm(len(homes[stage]), len(homes[stage + 1]))):
                here = places.home(stage, micro, direction)
                there = places.home(stage + 1, micro, direction)
                # Where tiles end between two stages, only the first shard has a partner on the
                # other side.
                for shard in range(min(tile_groups.sizes[here], tile_groups.sizes[there])):
                    one, other = tile_groups.rank(here, shard), tile_groups.rank(there, shard)
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
    # Long enough for the pipeline to be full: from then on a rank's lag does not grow any more.
    steady = layout.stream().unroll(4 * layout.ranks)
    if facts(steady).versions[rank] == 1:
        return Weights
    behind, newest = 0, 0
    for action in steady.actions[rank]:
        if action.kind == "U":
            newest = action.version
        elif action.kind == "F":
            behind = max(behind, newest - action.version)
    return lambda module: Stash(module, behind)


def _lowered(settings: ComputeSettings) -> Callable[[], AbstractContextManager[object]]:
    if settings.precision is None:
        return nullcontext
    return lambda: torch.autocast(settings.device.type, settings.precision)
