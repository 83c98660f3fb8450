"""Linear layers on tiles: over the last axis, whole on every shard or divided by channels.

Divided, a shard computes its share of the outputs. It either asks for all inputs and uses its rows
of the weight, or uses its inputs with their columns and the shards add up: whatever moves less.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from farandole.layout.tiles.core.flow import Flow
from farandole.layout.tiles.core.frames import Frame, tile_of
from farandole.layout.tiles.core.grid import CHANNELS
from farandole.layout.tiles.core.intervals import Interval, owned_interval
from farandole.layout.tiles.core.tile import Tile
from farandole.layout.tiles.halo.windows import as_needs
from farandole.layout.tiles.ops.reductions import over_shards


def linear(flow: Flow, input: Tile, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
    """`F.linear`."""
    dim = len(input.axes)
    parts = flow.grid.parts[CHANNELS]
    if not dim or weight.dim() != 2 or weight.shape[1] != input.sizes[-1]:
        return flow.otherwise(flow, F.linear, (input, weight, bias), {})
    if input.axes[-1] not in (CHANNELS, None) and input.is_divided(dim):
        return flow.otherwise(flow, F.linear, (input, weight, bias), {})
    sizes = (*input.sizes[:-1], weight.shape[0])
    if parts == 1 or not input.is_divided(dim):
        pieces = [F.linear(piece, weight, bias) for piece in input.pieces]
        made = Tile(flow, pieces, sizes, input.axes, input.margin)
        made.sources = input.sources
        return made
    columns = input.sizes[-1]
    spans = [owned_interval(at[CHANNELS], parts, weight.shape[0]) for at in flow.grid.coordinates]
    # Adding up sends all outputs, and asking sends all inputs: the smaller of the two travels.
    if weight.shape[0] < columns and not any(before or after for before, after in input.margin):
        return _added_up(flow, input, weight, bias, sizes, spans)
    frame = Frame(sizes, input.axes, (*input.margin[:-1], (0, 0)))
    needs = []
    for shard in range(flow.grid.shards):
        box = (*frame.held(flow, shard)[:-1], Interval(0, columns))
        needs.append(as_needs(box))
    pieces = []
    for shard, source in zip(flow.shards.mine, input.collect(needs), strict=True):
        at = spans[shard].slice
        pieces.append(F.linear(source, weight[at], None if bias is None else bias[at]))
    return tile_of(flow, frame, pieces)


def _added_up(
    flow: Flow,
    input: Tile,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    sizes: tuple[int, ...],
    spans: list[Interval],
) -> Tile:
    """Every shard's part of all outputs, summed; each keeps its own outputs."""
    dim = len(input.axes)
    partial = [
        F.linear(piece, weight[:, input.owned(shard)[-1].slice])
        for shard, piece in zip(flow.shards.mine, input.pieces, strict=True)
    ]
    pieces = []
    for shard, whole in zip(
        flow.shards.mine, over_shards(flow, input, [dim], partial), strict=True
    ):
        at = spans[shard].slice
        own = whole[..., at]
        pieces.append(own if bias is None else own + bias[at])
    return Tile(flow, pieces, sizes, input.axes)
