"""Changes of shape that leave the divided axes as they are, and what only moves axes about."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from farandole.layout.tiles.frames import Frame, tile_of, whole_along
from farandole.layout.tiles.tile import Flow, Tile


def flatten(flow: Flow, input: Tile, start_dim: int = 0, end_dim: int = -1) -> Any:
    """`torch.flatten`. Behind the samples, if nothing but the first of the axes is divided."""
    count = len(input.axes) + 1
    start, end = start_dim % count, end_dim % count
    shape = list(input.shape)
    if start == 0 < end:
        return flow.otherwise(flow, torch.flatten, (input, start_dim, end_dim), {})
    length = math.prod(shape[start : end + 1])
    return reshape(flow, input, [*shape[:start], length, *shape[end + 1 :]])


def unflatten(flow: Flow, input: Tile, dim: int, sizes: Sequence[int]) -> Any:
    """`torch.unflatten`."""
    at = dim % (len(input.axes) + 1)
    shape = list(input.shape)
    known = math.prod(size for size in sizes if size != -1)
    return reshape(
        flow,
        input,
        [
            *shape[:at],
            *(shape[at] // known if size == -1 else size for size in sizes),
            *shape[at + 1 :],
        ],
    )


def reshape(flow: Flow, input: Tile, *shape: Any) -> Any:
    """`torch.reshape` and `view`, where every divided axis stays one, or is divided evenly."""
    if len(shape) == 1 and isinstance(shape[0], torch.dtype):  # other bits of the same memory
        return flow.otherwise(flow, torch.Tensor.view, (input, *shape), {})
    wanted = list(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else list(shape)
    known = math.prod(size for size in wanted if size != -1)
    wanted = [input.numel() // max(1, known) if size == -1 else size for size in wanted]
    # An axis of one element costs nothing to have everywhere, and then divides nothing.
    input = whole_along(input, [at + 1 for at, size in enumerate(input.sizes) if size == 1])
    axes = _axes(input, wanted)
    if axes is None:
        return flow.otherwise(flow, torch.reshape, (input, wanted), {})
    sizes = tuple(wanted[1:])
    pieces = []
    for lane, piece in zip(flow.lanes.mine, input.own_pieces(), strict=True):
        box = flow.grid.owned(lane, sizes, axes)
        pieces.append(piece.reshape(piece.shape[0], *(interval.length for interval in box)))
    return Tile(flow, pieces, sizes, axes)


def _axes(input: Tile, wanted: list[int]) -> tuple[int | None, ...] | None:
    """What divides the axes of the new shape; None: lanes would have to exchange something."""
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
        if divided != [0] or axis is None:
            return None
        parts = grid.parts[axis]
        if len(taken) == len(sizes) == 1 or size % parts == 0 == sizes[0] % parts:
            axes += [axis, *[None] * (len(sizes) - 1)]
        else:
            return None
    return tuple(axes)


def squeeze(flow: Flow, input: Tile, dim: Any = None) -> Any:
    """`torch.squeeze`; never the samples."""
    count = len(input.axes) + 1
    if dim is None:
        dim = range(count)
    dims = {at % count for at in ([dim] if isinstance(dim, int) else dim)}
    gone = [at for at in sorted(dims) if at and input.sizes[at - 1] == 1]
    if 0 in dims and input.rows == 1:
        return flow.otherwise(flow, torch.squeeze, (input, tuple(dims)), {})
    input = whole_along(input, gone)
    kept = [at for at in range(len(input.axes)) if at + 1 not in gone]
    return _with_axes(input, [piece.squeeze(gone) for piece in input.pieces], kept)


def unsqueeze(flow: Flow, input: Tile, dim: int) -> Any:
    """`torch.unsqueeze`; not before the samples."""
    at = dim % (len(input.axes) + 2)
    if at == 0:
        return flow.otherwise(flow, torch.unsqueeze, (input, dim), {})
    kept: list[int | None] = list(range(len(input.axes)))
    kept.insert(at - 1, None)
    return _with_axes(input, [piece.unsqueeze(at) for piece in input.pieces], kept)


def expand(flow: Flow, input: Tile, *shape: Any) -> Any:
    """`Tensor.expand` of axes with one element."""
    wanted = list(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else list(shape)
    count = len(input.axes) + 1
    if len(wanted) != count:
        return flow.otherwise(flow, torch.Tensor.expand, (input, *wanted), {})
    sizes = tuple(
        old if new == -1 else new for old, new in zip(input.sizes, wanted[1:], strict=True)
    )
    grown = [at + 1 for at, size in enumerate(sizes) if size != input.sizes[at]]
    input = whole_along(input, grown)
    frame = Frame(sizes, regained(flow, input.axes, grown), input.margin)
    pieces = []
    for lane, piece in zip(flow.lanes.mine, input.pieces, strict=True):
        lengths = (interval.length for interval in frame.held(flow, lane))
        pieces.append(piece.expand(wanted[0], *lengths))
    return tile_of(flow, frame, pieces)


def expand_as(flow: Flow, input: Any, other: torch.Tensor) -> Any:
    """`Tensor.expand_as`."""
    if not isinstance(input, Tile):
        return input.expand(tuple(other.shape))
    return expand(flow, input, tuple(other.shape))


def regained(flow: Flow, axes: Sequence[int | None], dims: Sequence[int]) -> tuple[int | None, ...]:
    """The axes of a tensor that becomes an image again along some dimensions, which every lane had
    whole: each lane need not compute all of it."""
    image = flow.grid.image_axes
    if len(axes) != len(image):
        return tuple(axes)
    return tuple(
        image[at] if axis is None and at + 1 in dims and image[at] not in axes else axis
        for at, axis in enumerate(axes)
    )


def permute(flow: Flow, input: Tile, *dims: Any, **named: Any) -> Any:
    """`torch.permute`; the batch stays in front."""
    dims = (named["dims"],) if named else dims
    count = len(input.axes) + 1
    given = dims[0] if len(dims) == 1 and not isinstance(dims[0], int) else dims
    order = [at % count for at in given]
    if order[0] != 0:
        return flow.otherwise(flow, torch.permute, (input, order), {})
    pieces = [piece.permute(order) for piece in input.pieces]
    return _with_axes(input, pieces, [at - 1 for at in order[1:]])


def transpose(flow: Flow, input: Tile, dim0: int, dim1: int) -> Any:
    """`torch.transpose`."""
    order = list(range(len(input.axes) + 1))
    order[dim0], order[dim1] = order[dim1], order[dim0]
    return permute(flow, input, order)


def movedim(flow: Flow, input: Tile, source: Any, destination: Any) -> Any:
    """`torch.movedim`."""
    count = len(input.axes) + 1
    sources = [source] if isinstance(source, int) else list(source)
    targets = [destination] if isinstance(destination, int) else list(destination)
    taken = {to % count: at % count for at, to in zip(sources, targets, strict=True)}
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
