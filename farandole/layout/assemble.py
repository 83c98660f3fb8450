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
from farandole.layout.partition.stage_module import Rerun, StageModule, names_in, release
from farandole.layout.pipeline.deferred import DeferredBatchNorm, defer_statistics
from farandole.layout.pipeline.gradient_bridge import GradientBridge
from farandole.layout.pipeline.gradient_groups import (
    Placement,
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
from farandole.layout.tiles.core.grid import Grid
from farandole.layout.tiles.core.shard_group import LocalShards, MailShards, ShardGroup
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
    placement = Placement(places, tile_groups)
    place = tile_groups.place(pipe.rank)
    held = {stage: modules[stage] for stage in places.held(place)}
    layers = {module: name for name, module in model.named_modules() if name}
    if layout.handoff and layout.handoff not in layers.values():
        raise UserError(
            f"handoff: the model has no submodule {layout.handoff!r}. "
            f"{nearest(layout.handoff, layers.values())}"
        )
    bridge = GradientBridge(held, unused(model, tensors) if pipe.rank == 0 else ())
    names = names_in(model, bridge)
    release(model, bridge)
    buffers = dict(bridge.named_buffers())
    for module in held.values():
        module.to(settings.device)
        if layout.batchnorm == "deferred":
            defer_statistics(module)
    bridge.to(settings.device)
    _follow(model, buffers, bridge)
    groups = find_gradient_groups(placement, pipe, bridge, tensors)
    scale = LossScale(pipe) if settings.precision is torch.float16 else None
    hooks = WeightHooks(bridge, names, whole=len(modules) == 1)
    update = Update(bridge, groups, hooks, averages=layout.streams, clip=settings.clip, scale=scale)

    def name_of(rank: int) -> str:
        stages = "+".join(map(str, places.held(tile_groups.place(rank))))
        return f"rank {first_rank + rank} (stage {stages})"

    mail = Mail(pipe, routes(places, tile_groups), settings.device, name_of)
    shards = _shards(layout, tile_groups, pipe.rank, mail)
    handoff_stage = _stage_of(layout.handoff, modules, layers)
    tilings = {} if shards is None else _tilings(layout, held, shards, layers, handoff_stage)
    for stage, module in held.items() if layout.recompute_blocks else ():
        module.rerun = _rerun(tilings.get(stage), offload=layout.offload)
        module.rerun_blocks = layout.recompute_blocks
    for module in held.values():
        module.runs_again, module.draws_alike = layout.recompute, shards is not None
    kinds = _weights(layout, place)
    last = places.stages - 1
    means = _means(layout, objective)
    stages = {
        stage: Stage(
            stage,
            kinds(module),
            objective.of if stage == last else None,
            recompute=layout.recompute and not layout.recompute_blocks,
            offload=layout.offload,
            lowered=_lowered(settings),
            tiling=tilings.get(stage),
            means=means,
            changes=_changes(layout, module, layers) if strict else None,
        )
        for stage, module in held.items()
    }
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
        tile_group=_tile_group(tile_groups, pipe),
        means=means,
    )
    owned = {use.name for use in tensors.values() if owner(placement, use) == pipe.rank}
    return Assembled(pipelined, bridge, names, owned, tilings)


def _follow(model: nn.Module, before: Mapping[str, torch.Tensor], bridge: GradientBridge) -> None:
    """A buffer that was moved is a new tensor. The script's model shall have it too, so that what a
    script writes to a buffer is what the stages read."""
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
    first, modules = 0, {}
    for stage, count in enumerate(balance):
        modules[stage] = StageModule(blocks[first : first + count], first)
        first += count
    return modules


def _tilings(
    layout: Layout,
    held: Mapping[int, StageModule],
    shards: ShardGroup,
    layers: Mapping[nn.Module, str],
    handoff_stage: int,
) -> dict[int, Tiling]:
    """One for each stage of a rank: they are at different layers at the same time.

    `handoff_stage`: the stage of the chosen hand-off. Behind it, what is left of tiles may end
    anywhere.
    """
    last_tiled = layout.tiled - 1 if layout.tiled and layout.tiled != layout.stages else None
    tilings = {}
    for stage, module in held.items():
        inside = set(module.modules())
        tilings[stage] = Tiling(
            shards,
            {layer: name for layer, name in layers.items() if layer in inside},
            chosen=layout.handoff if stage <= handoff_stage else "",
            gathers=stage == last_tiled,
        )
        tilings[stage].flow.overlap = layout.overlap
        for layer in inside:
            if isinstance(layer, DeferredBatchNorm):
                layer.counted = tilings[stage].counted
    return tilings


def _stage_of(
    name: str, modules: Mapping[int, StageModule], layers: Mapping[nn.Module, str]
) -> int:
    """The stage that has a layer; the last one if none has it as a module of its own."""
    for stage, module in modules.items():
        if any(layers.get(each) == name for each in module.modules()):
            return stage
    return len(modules) - 1


def _rerun(tiling: Tiling | None, *, offload: bool) -> Rerun:
    def rerun(run: Callable[[Any], Any], value: Any, module: nn.Module, late: bool) -> Any:
        again = run if tiling is None else tiling.repeatable(run)
        # What is needed again soon stays: the way to the host and back would take longer.
        return recomputed(
            again, value, module, offload=offload and late, to_the_end=tiling is not None
        )

    return rerun


def _shards(layout: Layout, tile_groups: TileGroups, rank: int, mail: Mail) -> ShardGroup | None:
    """The tiles of a rank's stages; None: it has none."""
    place = tile_groups.place(rank)
    if layout.shards == 1 or (layout.tiled and place >= layout.tiled):
        return None
    grid = Grid(layout.tiles, layout.channels)
    if layout.in_turn:
        return LocalShards(grid)
    return MailShards(grid, tile_groups.shard(rank), mail, list(tile_groups.members(place)))


def _tile_group(tile_groups: TileGroups, pipe: Group) -> Group | None:
    """*Together.* The ranks with the other tiles of this rank's stages."""
    place = tile_groups.place(pipe.rank)
    return pipe.subgroup(tile_groups.members(place)) if tile_groups.sizes[place] > 1 else None


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
    for replica, homes in enumerate(places.homes):
        for stage in range(places.stages - 1):
            for micro in range(math.lcm(len(homes[stage]), len(homes[stage + 1]))):
                here = places.home(stage, micro, replica)
                there = places.home(stage + 1, micro, replica)
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
