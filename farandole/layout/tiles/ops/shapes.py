"""Changes of shape that leave the divided axes as they are, and what only moves axes about."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from farandole.layout.tiles.core.flow import Flow
from farandole.layout.tiles.core.frames import Frame, tile_of, whole_along
from farandole.layout.tiles.core.spelling import position, positions
from farandole.layout.tiles.core.tile import Tile


def flatten(flow: Flow, input: Tile, start_dim: int = 0, end_dim: int = -1) -> Any:
    """`torch.flatten`. Behind the samples, if nothing but the first of the axes is divided."""
    count = len(input.axes) + 1
    start, end = position(start_dim, count), position(end_dim, count)
    shape = list(input.shape)
    if start == 0 < end or start > end:
        return flow.otherwise(flow, torch.flatten, (input, start_dim, end_dim), {})
    length = math.prod(shape[start : end + 1])
    return reshape(flow, input, [*shape[:start], length, *shape[end + 1 :]])


def unflatten(flow: Flow, input: Tile, dim: int, sizes: Sequence[int]) -> Any:
    """`torch.unflatten`."""
    at = position(dim, len(input.axes) + 1)
    shape = list(input.shape)
    wanted = _completed(sizes, shape[at])
    if wanted is None or not sizes:
        return flow.otherwise(flow, torch.unflatten, (input, dim, sizes), {})
    return reshape(flow, input, [*shape[:at], *wanted, *shape[at + 1 :]])


def reshape(flow: Flow, input: Tile, shape: Sequence[int]) -> Any:
    """`torch.reshape` and `view`, where every divided axis stays one, or is divided evenly."""
    wanted = _completed(shape, input.numel())
    if wanted is None:
        return flow.otherwise(flow, torch.reshape, (input, shape), {})
    # An axis of one element costs nothing to have everywhere, and then divides nothing.
    input = whole_along(input, [at + 1 for at, size in enumerate(input.sizes) if size == 1])
    axes = _axes(input, wanted)
    if axes is None:
        return flow.otherwise(flow, torch.reshape, (input, wanted), {})
    sizes = tuple(wanted[1:])
    pieces = []
    for shard, piece in zip(flow.shards.mine, input.own_pieces(), strict=True):
        box = flow.grid.owned(shard, sizes, axes)
        pieces.append(piece.reshape(piece.shape[0], *(interval.length for interval in box)))
    return Tile(flow, pieces, sizes, axes)


def _completed(shape: Sequence[int], elements: int) -> list[int] | None:
    """A shape with the size that is left out; None if there are not as many elements in it."""
    known = math.prod(size for size in shape if size != -1)
    missing = list(shape).count(-1)
    if any(size < -1 for size in shape) or missing > 1 or (missing and (not known)):
        return None
    wanted = [elements // known if size == -1 else size for size in shape]
    return wanted if math.prod(wanted) == elements else None


def _axes(input: Tile, wanted: list[int]) -> tuple[int | None, ...] | None:
    """What divides the axes of the new shape; None: shards would have to exchange something."""
    grid = input.flow.grid
    if not wanted or wanted[0] != input.rows or math.prod(wanted) != input.numel():
        return None
    if not input.divided:
        return (None,) * (len(wanted) - 1)
    if not input.numel():
        return None
    old = [each for each in zip(input.sizes, input.axes, strict=True) if each[0] != 1]
    new = wanted[1:]
    axes: list[int | None] = []
    while new:
        if new[0] == 1:
            axes.append(None)
            new.pop(0)
            continue
        # As few axes of both shapes as have the same product belong together.
        taken, sizes = [old.pop(0)], [new.pop(0)]
        while (left := math.prod(size for size, _ in taken)) != (right := math.prod(sizes)):
            if left < right:
                taken.append(old.pop(0))
            else:
                sizes.append(new.pop(0))
        divided = [index for index, (_, axis) in enumerate(taken) if grid.is_divided(axis)]
        if not divided:
            axes += [None] * len(sizes)
            continue
        size, axis = taken[0]
        # Only the outermost axis of a merged group may be divided. A shard's part of an inner one
        # is not contiguous in the merged axis.
        if divided != [0] or axis is None:
            return None
        parts = grid.parts[axis]
        # Merged or split, an axis is still divided at the same elements only if both sizes divide
        # evenly: shares of uneven sizes are rounded.
        if len(taken) == len(sizes) == 1 or size % parts == 0 == sizes[0] % parts:
            axes += [axis, *[None] * (len(sizes) - 1)]
        else:
            return None
    return tuple(axes)


def squeeze(flow: Flow, input: Tile, dim: int | Sequence[int] | None = None) -> Any:
    """`torch.squeeze`; never the samples."""
    if dim is not None and not isinstance(dim, int) and not dim:
        return input.like(input.pieces)
    dims = positions(dim, len(input.axes) + 1)
    gone = [at for at in sorted(dims) if at and input.sizes[at - 1] == 1]
    if 0 in dims and input.rows == 1:
        return flow.otherwise(flow, torch.squeeze, (input, tuple(dims)), {})
    input = whole_along(input, gone)
    kept = [at for at in range(len(input.axes)) if at + 1 not in gone]
    return _with_axes(input, [piece.squeeze(gone) for piece in input.pieces], kept)


def unsqueeze(flow: Flow, input: Tile, dim: int) -> Any:
    """`torch.unsqueeze`; not before the samples."""
    at = position(dim, len(input.axes) + 2)
    if at == 0:
        return flow.otherwise(flow, torch.unsqueeze, (input, dim), {})
    kept: list[int | None] = list(range(len(input.axes)))
    kept.insert(at - 1, None)
    return _with_axes(input, [piece.unsqueeze(at) for piece in input.pieces], kept)


def expand(flow: Flow, input: Tile, shape: Sequence[int]) -> Any:
    """`Tensor.expand` of axes with one element."""
    wanted = list(shape)
    count = len(input.axes) + 1
    fits = len(wanted) == count and all(
        new in (-1, old) or (old == 1 and new >= 0)
        for old, new in zip((input.rows, *input.sizes), wanted, strict=True)
    )
    if not fits:
        return flow.otherwise(flow, torch.Tensor.expand, (input, *wanted), {})
    sizes = tuple(
        old if new == -1 else new for old, new in zip(input.sizes, wanted[1:], strict=True)
    )
    grown = [at + 1 for at, size in enumerate(sizes) if size != input.sizes[at]]
    input = whole_along(input, grown)
    frame = Frame(sizes, regained(flow, input.axes, grown), input.margin)
    pieces = []
    for shard, piece in zip(flow.shards.mine, input.pieces, strict=True):
        lengths = (interval.length for interval in frame.held(flow, shard))
        pieces.append(piece.expand(wanted[0], *lengths))
    return tile_of(flow, frame, pieces)


def expand_as(flow: Flow, input: Any, other: Any) -> Any:
    """`Tensor.expand_as`."""
    if not isinstance(input, Tile):
        return input.expand(tuple(other.shape))
    return expand(flow, input, tuple(other.shape))


def regained(flow: Flow, axes: Sequence[int | None], dims: Sequence[int]) -> tuple[int | None, ...]:
    """The axes of a tensor that becomes an image again along some dimensions, which every shard had
    whole: each shard need not compute all of it."""
    image = flow.grid.image_axes
    if len(axes) != len(image):
        return tuple(axes)
    return tuple(
        image[at] if axis is None and at + 1 in dims and image[at] not in axes else axis
        for at, axis in enumerate(axes)
    )


def permute(flow: Flow, input: Tile, dims: Sequence[int]) -> Any:
    """`torch.permute`; the batch stays in front."""
    count = len(input.axes) + 1
    if len(dims) != count:
        return flow.otherwise(flow, torch.permute, (input, dims), {})
    order = positions(dims, count)
    if order[0] != 0:
        return flow.otherwise(flow, torch.permute, (input, order), {})
    pieces = [piece.permute(order) for piece in input.pieces]
    return _with_axes(input, pieces, [at - 1 for at in order[1:]])


def transpose(flow: Flow, input: Tile, dim0: int, dim1: int) -> Any:
    """`torch.transpose`."""
    count = len(input.axes) + 1
    one, other = position(dim0, count), position(dim1, count)
    order = list(range(count))
    order[one], order[other] = other, one
    return permute(flow, input, order)


def swapaxes(flow: Flow, input: Tile, axis0: int, axis1: int) -> Any:
    """`torch.swapaxes`."""
    return transpose(flow, input, axis0, axis1)


def movedim(
    flow: Flow, input: Tile, source: int | Sequence[int], destination: int | Sequence[int]
) -> Any:
    """`torch.movedim`."""
    count = len(input.axes) + 1
    sources = positions(source, count) if source != () else ()
    targets = positions(destination, count) if destination != () else ()
    if len(sources) != len(targets):
        return flow.otherwise(flow, torch.movedim, (input, source, destination), {})
    taken = dict(zip(targets, sources, strict=True))
    rest = iter(at for at in range(count) if at not in taken.values())
    return permute(flow, input, [taken[at] if at in taken else next(rest) for at in range(count)])


def _with_axes(input: Tile, pieces: Sequence[torch.Tensor], kept: Sequence[int | None]) -> Tile:
    """A tile whose axes are those of another, in another order; None: a new one, of size 1."""
    made = Tile(
        input.flow,
        pieces,
        [1 if at is None else input.sizes[at] for at in kept],
        tuple(None if at is None else input.axes[at] for at in kept),
        tuple((0, 0) if at is None else input.margin[at] for at in kept),
    )
    made.sources = input.sources
    return made
