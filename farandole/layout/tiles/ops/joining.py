"""Concatenations along any axis."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from farandole.layout.tiles.core.flow import Flow
from farandole.layout.tiles.core.frames import Frame, aligned, common_margin, frame_of, tile_of
from farandole.layout.tiles.core.grid import Axes
from farandole.layout.tiles.core.intervals import Interval
from farandole.layout.tiles.core.spelling import position
from farandole.layout.tiles.core.tile import Tile, cut
from farandole.layout.tiles.halo.windows import as_needs


def cat(flow: Flow, tensors: Sequence[Any], dim: int = 0) -> Any:
    """`torch.cat`. Each shard asks every tensor for the part that its share of the result has.

    A plain tensor among them is whole on every shard, and is cut.
    """
    first = next(tensor for tensor in tensors if isinstance(tensor, Tile))
    axes = _common_axes(flow, [each for each in tensors if isinstance(each, Tile)])
    at = position(dim, first.dim())
    fits = len({_without(tuple(each.shape), at) for each in tensors}) == 1
    if axes is None or not fits:
        return flow.otherwise(flow, torch.cat, (tensors, dim), {})
    tiles = [each if isinstance(each, Tile) else cut(flow, each, axes) for each in tensors]
    if at == 0 or not flow.grid.is_divided(axes[at - 1]):
        return _here(flow, tiles, axes, at)
    lengths = [tile.sizes[at - 1] for tile in tiles]
    sizes = _joined(tiles, at)
    columns, start = [], 0
    for tile, length in zip(tiles, lengths, strict=True):
        here = Interval(start, start + length)
        needs = []
        for shard in range(flow.grid.shards):
            box = list(flow.grid.owned(shard, sizes, axes))
            # The part of this shard's share of the result that lies in this tensor, in the tensor's
            # own positions. It is often empty, and often owned by another shard.
            box[at - 1] = box[at - 1].meets(here).moved(-start)
            needs.append(as_needs(tuple(box)))
        columns.append(tile.collect(needs))
        start += length
    pieces = [torch.cat(parts, at) for parts in zip(*columns, strict=True)]
    return tile_of(flow, Frame(sizes, axes, ((0, 0),) * len(axes)), pieces)


def _without(shape: tuple[int, ...], at: int) -> tuple[int, ...]:
    """All sizes but one. One dimension more or less is another shape still."""
    return (*shape[:at], -1, *shape[at + 1 :]) if at < len(shape) else shape


def _here(flow: Flow, tiles: Sequence[Tile], axes: Axes, at: int) -> Tile:
    """Along a dimension that every shard has whole."""
    margin = common_margin(flow, tiles, tiles[0].sizes)
    columns = [
        aligned(flow, tile, frame_of(tile)._replace(axes=axes, margin=margin)) for tile in tiles
    ]
    pieces = [torch.cat(parts, at) for parts in zip(*columns, strict=True)]
    result = tile_of(flow, Frame(_joined(tiles, at), axes, margin), pieces)
    result.sources = frozenset().union(*(tile.sources for tile in tiles))
    return result


def _joined(tiles: Sequence[Tile], at: int) -> tuple[int, ...]:
    sizes = list(tiles[0].sizes)
    if at:
        sizes[at - 1] = sum(tile.sizes[at - 1] for tile in tiles)
    return tuple(sizes)


def _common_axes(flow: Flow, tiles: Sequence[Tile]) -> Axes | None:
    """What divides the result: an axis of the grid that divides any of them; None if they differ in
    that."""
    if len({len(tile.axes) for tile in tiles}) > 1:
        return None
    axes: list[int | None] = []
    for column in zip(*(tile.axes for tile in tiles), strict=True):
        divided = {axis for axis in column if flow.grid.is_divided(axis)}
        if len(divided) > 1 or any(axis in axes for axis in divided):
            return None
        axes.append(next(iter(divided or {axis for axis in column if axis is not None}), None))
    return tuple(axes)
