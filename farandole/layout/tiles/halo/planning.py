"""After the first steps: how many layers share a halo, and what there is to say about the tiles."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from farandole.comm import Group
from farandole.comm.calibration import link_between
from farandole.layout.tiles.core.tiling import Tiling
from farandole.layout.tiles.halo.fusing import choose_groups, describe, fused, margins_for
from farandole.schedule import Link

_AT_ONCE = Link(1e-9, 0.0)  # between shards of one process


def plan_halos(
    tilings: Mapping[int, Tiling], halo: int | Literal["auto"], tile_group: Group | None
) -> list[str]:
    """*Together*, all ranks of a tile group, which choose alike: the first one's measurements
    count.

    Returns what was found, a line for each stage.
    """
    link = _AT_ONCE if tile_group is None else link_between(tile_group.transport, 0, 1)
    lines = []
    for stage, tiling in sorted(tilings.items()):
        layers = tiling.end_recording()
        if tile_group is not None:
            # Invariant: all shards choose the same groups, or they would disagree about who asks
            # whom. Measured times differ between ranks, so those of one rank are used by all.
            seconds = tile_group.broadcast_json([layer.seconds for layer in layers])
            layers = [
                layer._replace(seconds=spent) for layer, spent in zip(layers, seconds, strict=True)
            ]
        grid = tiling.flow.grid
        groups = choose_groups(grid, layers, link) if halo == "auto" else fused(grid, layers, halo)
        tiling.flow.margins = margins_for(grid, layers, groups)
        lines.append(f"stage {stage}: {describe(grid, layers, groups, link)}; {_end(tiling)}")
    return lines


def _end(tiling: Tiling) -> str:
    end = f"tiles up to {tiling.handed_off_at}" if tiling.handed_off_at else "tiles to its end"
    if not tiling.replicated_at:
        return end
    return f"{end}; computed whole by every rank: {', '.join(tiling.replicated_at)}"
