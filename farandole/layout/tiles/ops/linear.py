"""Linear layers on tiles: over the last axis, whole on every lane or divided by channels.

Divided, a lane computes its share of the outputs. It either asks for all inputs and uses its rows
of the weight, or uses its inputs with their columns and the lanes add up: whatever moves less.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from farandole.layout.tiles.core.frames import Frame, tile_of
from farandole.layout.tiles.core.grid import CHANNELS
from farandole.layout.tiles.core.intervals import Interval, share
from farandole.layout.tiles.core.tile import Flow, Tile
from farandole.layout.tiles.halo.windows import as_needs
from farandole.layout.tiles.ops.reductions import over_lanes


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
    spans = [share(at[CHANNELS], parts, weight.shape[0]) for at in flow.grid.coordinates]
    if weight.shape[0] < columns and not any(before or after for before, after in input.margin):
        return _added_up(flow, input, weight, bias, sizes, spans)
    frame = Frame(sizes, input.axes, (*input.margin[:-1], (0, 0)))
    needs = []
    for lane in range(flow.grid.lanes):
        box = (*frame.held(flow, lane)[:-1], Interval(0, columns))
        needs.append(as_needs(box))
    pieces = []
    for lane, source in zip(flow.lanes.mine, input.collect(needs), strict=True):
        at = spans[lane].slice
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
    """Every lane's part of all outputs, summed; each keeps its own outputs."""
    dim = len(input.axes)
    partial = [
        F.linear(piece, weight[:, input.owned(lane)[-1].slice])
        for lane, piece in zip(flow.lanes.mine, input.pieces, strict=True)
    ]
    pieces = []
    for lane, whole in zip(flow.lanes.mine, over_lanes(flow, input, [dim], partial), strict=True):
        at = spans[lane].slice
        own = whole[..., at]
        pieces.append(own if bias is None else own + bias[at])
    return Tile(flow, pieces, sizes, input.axes)
