"""The tiles of a rank's stages: which it has, who has the others, and where the tiles end."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from farandole.comm import Group
from farandole.comm.p2p.mail import Mail
from farandole.errors import UserError, nearest
from farandole.layout.layout import Layout
from farandole.layout.option_groups import TileOptions
from farandole.layout.partition.stage_module import StageModule
from farandole.layout.pipeline.deferred import DeferredBatchNorm
from farandole.layout.tile_groups import TileGroups
from farandole.layout.tiles.core.grid import Grid
from farandole.layout.tiles.core.shard_group import LocalShards, MailShards, ShardGroup
from farandole.layout.tiles.core.tiling import Tiling


def check_handoff(layout: TileOptions, layers: Mapping[nn.Module, str]) -> None:
    """Raises `UserError` where the model has no layer of that name."""
    if layout.handoff and layout.handoff not in layers.values():
        raise UserError(
            f"handoff: the model has no submodule {layout.handoff!r}. "
            f"{nearest(layout.handoff, layers.values())}"
        )


def make_tilings(
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
        # A tiling watches the layers of its own stage only. Two stages of one rank are at different
        # layers, and each tiling keeps its own path for error messages.
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


def stage_of(name: str, modules: Mapping[int, StageModule], layers: Mapping[nn.Module, str]) -> int:
    """The stage that has a layer; the last one if none has it as a module of its own."""
    for stage, module in modules.items():
        if any(layers.get(each) == name for each in module.modules()):
            return stage
    return len(modules) - 1


def shards_of(
    layout: TileOptions, tile_groups: TileGroups, rank: int, mail: Mail
) -> ShardGroup | None:
    """The tiles of a rank's stages; None: it has none."""
    place = tile_groups.place(rank)
    if layout.shards == 1 or (layout.tiled and place >= layout.tiled):
        return None
    grid = Grid(layout.tiles, layout.channels)
    if layout.in_turn:
        return LocalShards(grid)
    return MailShards(grid, tile_groups.shard(rank), mail, list(tile_groups.members(place)))


def tile_group_of(tile_groups: TileGroups, pipe: Group) -> Group | None:
    """*Together.* The ranks with the other tiles of this rank's stages."""
    place = tile_groups.place(pipe.rank)
    return pipe.subgroup(tile_groups.members(place)) if tile_groups.sizes[place] > 1 else None
