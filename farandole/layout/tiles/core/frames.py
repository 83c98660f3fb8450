"""Where several tensors meet: how what is made of them is divided, and each shard's part of them.

Tensors are broadcast as torch does. An axis of the result is divided if it is in any tensor that
has all of it; a tensor that every shard has whole is cut there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from farandole.errors import UserError
from farandole.layout.tiles.core.flow import Flow, no_margin
from farandole.layout.tiles.core.grid import Axes, Box, Margin
from farandole.layout.tiles.core.intervals import Interval
from farandole.layout.tiles.core.tile import Tile, empty_result
from farandole.layout.tiles.halo.windows import as_needs

_ENDLESS = (2**62, 2**62)  # a margin where a shard has all of an axis


class Frame(NamedTuple):
    """How a tensor is divided: its sizes without the batch, what divides it, and the margin."""

    sizes: tuple[int, ...]
    axes: Axes
    margin: Margin

    def held(self, flow: Flow, shard: int) -> Box:
        return flow.grid.held(shard, self.sizes, self.axes, self.margin)

    def without_margin(self) -> Frame:
        return self._replace(margin=no_margin(len(self.axes)))

    def divided_like(self, flow: Flow, other: Frame) -> bool:
        """Whether all shards own the same of both."""
        return self.sizes == other.sizes and all(
            mine == its or not (flow.grid.is_divided(mine) or flow.grid.is_divided(its))
            for mine, its in zip(self.axes, other.axes, strict=True)
        )


def frame_of(tile: Tile) -> Frame:
    return Frame(tile.sizes, tile.axes, tile.margin)


def common_frame(flow: Flow, tensors: Sequence[torch.Tensor]) -> Frame | None:
    """Of what is made of the tensors by broadcasting; None if they are divided in ways that do not
    go together."""
    tiles = [tensor for tensor in tensors if isinstance(tensor, Tile)]
    count = max(len(tile.axes) for tile in tiles)
    # A tile with fewer axes has its samples where others have an axis of the image.
    if any(len(tile.axes) < count and tile.rows != 1 for tile in tiles):
        return None
    if any(tensor.dim() > count + 1 for tensor in tensors):
        return None
    shapes = [tuple(tensor.shape) for tensor in tensors]
    try:
        sizes = tuple(torch.broadcast_shapes(*shapes)[1:])
    except RuntimeError as error:
        raise UserError(f"{flow.layer}: tensors of shapes {shapes} do not go together.") from error
    axes: list[int | None] = []
    for at, size in enumerate(sizes):
        found = {
            tile.axes[own]
            for tile in tiles
            if (own := at - count + len(tile.axes)) >= 0 and tile.sizes[own] == size
        } - {None}
        # One axis of the grid divides at most one axis of a tensor, and one axis of a tensor is
        # divided in one way only. Otherwise no shard would hold matching parts of both operands.
        divided = [axis for axis in found if flow.grid.is_divided(axis)]
        if len(divided) > 1 or any(axis in axes for axis in divided):
            return None
        axes.append(next(iter(divided or found), None))
    return Frame(sizes, tuple(axes), common_margin(flow, tiles, sizes))


def common_margin(flow: Flow, tiles: Sequence[Tile], sizes: Sequence[int]) -> Margin:
    """How far beyond what it owns a shard has all of the tiles."""
    margins = []
    for at in range(len(sizes)):
        sides = []
        for tile in tiles:
            own = at - len(sizes) + len(tile.axes)
            bound = own >= 0 and tile.sizes[own] > 1 and flow.grid.is_divided(tile.axes[own])
            sides.append(tile.margin[own] if bound else _ENDLESS)
        # The result is right only where all operands are there, so it has the smallest of their
        # margins.
        least = (min(before for before, _ in sides), min(after for _, after in sides))
        margins.append((0, 0) if least == _ENDLESS else least)
    return tuple(margins)


def aligned(flow: Flow, tensor: torch.Tensor, frame: Frame) -> list[torch.Tensor]:
    """Of a tensor that is broadcast against the frame: the part that belongs to each shard here."""
    if not isinstance(tensor, Tile):
        if tensor.dim() == 0 or tensor.numel() == 1:
            return [tensor] * len(flow.shards.mine)
        return [_cut(tensor, frame.held(flow, shard), frame.sizes) for shard in flow.shards.mine]
    if frame_of(tensor) == frame:
        return tensor.pieces
    offset = len(frame.axes) - len(tensor.axes)
    boxes = [
        tuple(
            # An axis with one element is broadcast: every shard needs this element, whatever part
            # of the result it has.
            Interval(0, 1) if size == 1 and full != 1 else wanted
            for wanted, size, full in zip(
                frame.held(flow, shard)[offset:], tensor.sizes, frame.sizes[offset:], strict=True
            )
        )
        for shard in range(flow.grid.shards)
    ]
    pieces = tensor.collect([as_needs(box) for box in boxes])
    return [
        _shaped(piece, boxes[shard]) for shard, piece in zip(flow.shards.mine, pieces, strict=True)
    ]


def whole_along(tile: Tile, dims: Sequence[int]) -> Tile:
    """The same tensor, but every shard has all of it along some dimensions."""
    inside = {dim - 1 for dim in dims if tile.is_divided(dim)}
    if not inside:
        return tile
    grid = tile.flow.grid
    sizes = tile.sizes
    axes = tuple(None if at in inside else axis for at, axis in enumerate(tile.axes))
    margin = tuple((0, 0) if at in inside else each for at, each in enumerate(tile.margin))
    frame = Frame(sizes, axes, margin)
    # What a shard that owns nothing of an axis lacks, it must ask for too.
    boxes = [frame.held(tile.flow, shard) for shard in range(grid.shards)]
    pieces = [
        _shaped(piece, boxes[shard])
        for shard, piece in zip(
            tile.flow.shards.mine, tile.collect([as_needs(box) for box in boxes]), strict=True
        )
    ]
    return Tile(tile.flow, pieces, sizes, axes, margin)


def tile_of(flow: Flow, frame: Frame, pieces: Sequence[torch.Tensor]) -> Tile:
    """A tile that is divided like the frame."""
    for shard, piece in zip(flow.shards.mine, pieces, strict=True):
        expected = tuple(interval.length for interval in frame.held(flow, shard))
        assert tuple(piece.shape[1:]) == expected, (
            f"{flow.layer}: a shard made {tuple(piece.shape[1:])} instead of {expected}"
        )
    return Tile(flow, pieces, frame.sizes, frame.axes, frame.margin)


def _cut(tensor: torch.Tensor, box: Box, sizes: Sequence[int]) -> torch.Tensor:
    """Of a plain tensor that every shard has whole; along what is broadcast, it stays so."""
    for dim in range(tensor.dim()):
        at = len(box) + 1 - tensor.dim() + dim  # its place among the dimensions of the frame
        if at > 0 and tensor.shape[dim] == sizes[at - 1]:
            tensor = tensor.narrow(dim, box[at - 1].start, box[at - 1].length)
    return tensor


def _shaped(piece: torch.Tensor, box: Box) -> torch.Tensor:
    """A piece without elements, in the shape of its box."""
    shape = (piece.shape[0], *(interval.length for interval in box))
    if tuple(piece.shape) == shape:
        return piece
    return empty_result(piece, shape)
