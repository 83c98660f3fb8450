"""Layers that only pick: every output is one input, or a constant, along each axis alone.

Slices, pads of all kinds, and upsampling to the nearest. A shard works out which positions its
outputs come from, asks for those, and picks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from farandole.errors import UserError
from farandole.layout.tiles.core.flow import Flow
from farandole.layout.tiles.core.grid import Needs
from farandole.layout.tiles.core.intervals import place_in, runs
from farandole.layout.tiles.core.spelling import position, positions
from farandole.layout.tiles.core.tile import Tile
from farandole.layout.tiles.ops.shapes import squeeze, unsqueeze

Positions = Callable[[int], int]
"""For an output's position, that of the input it comes from; negative: it is a constant."""


def pick(
    flow: Flow,
    input: Tile,
    sizes: Sequence[int],
    positions: Sequence[Positions | None],
    fill: float = 0.0,
) -> Tile:
    """The tensor of `sizes` whose elements come from `positions` of each axis; None: unchanged."""
    grid = flow.grid
    sizes = tuple(sizes)
    sources: list[list[list[int] | None]] = []  # by shard and axis; None: unchanged
    needs: list[Needs] = []
    for shard in range(grid.shards):
        owned = grid.owned(shard, sizes, input.axes)
        found = [
            None if from_ is None else [from_(at) for at in range(interval.start, interval.stop)]
            for from_, interval in zip(positions, owned, strict=True)
        ]
        sources.append(found)
        # Only positions that outputs really come from. A strided slice asks for runs with gaps, and
        # a shard without outputs asks for nothing.
        needs.append(
            tuple(
                (interval,) if each is None else runs(at for at in each if at >= 0)
                for each, interval in zip(found, owned, strict=True)
            )
        )
    pieces = []
    collected = input.collect(needs)
    for shard, piece in zip(flow.shards.mine, collected, strict=True):
        for axis, each in enumerate(sources[shard]):
            if each is not None:
                places = [place_in(needs[shard][axis], at) if at >= 0 else -1 for at in each]
                piece = _picked(piece, axis + 1, places, fill)
        pieces.append(piece)
    return Tile(flow, pieces, sizes, input.axes)


def _picked(piece: torch.Tensor, dim: int, places: Sequence[int], fill: float) -> torch.Tensor:
    before = next((index for index, at in enumerate(places) if at >= 0), len(places))
    after = next((index for index, at in enumerate(reversed(places)) if at >= 0), 0)
    after = after if before < len(places) else 0
    inner = list(places[before : len(places) - after])
    first = inner[0] if inner else 0
    step = inner[1] - inner[0] if len(inner) > 1 else 1
    if step > 0 and inner == [first + index * step for index in range(len(inner))]:
        piece = piece[(slice(None),) * dim + (slice(first, first + len(inner) * step, step),)]
        if not inner:
            piece = piece.narrow(dim, 0, 0)
    else:
        piece = piece.index_select(dim, torch.tensor(inner, device=piece.device))
    if before or after:
        piece = F.pad(piece, (0, 0) * (piece.dim() - dim - 1) + (before, after), value=fill)
    return piece


def getitem(flow: Flow, input: Any, index: Any) -> Any:
    """`x[…]` with slices, numbers and new axes; the samples are taken as they come."""
    parts = list(index) if isinstance(index, tuple) else [index]
    known = all(isinstance(each, (slice, int, type(None), type(Ellipsis))) for each in parts)
    if not isinstance(input, Tile) or not known or any(isinstance(each, bool) for each in parts):
        return flow.otherwise(flow, torch.Tensor.__getitem__, (input, index), {})
    taken = [each for each in parts if each is not None and each is not Ellipsis]
    missing = [slice(None)] * (len(input.axes) + 1 - len(taken))
    at = next((at for at, each in enumerate(parts) if each is Ellipsis), None)
    if at is None:
        parts += missing
    else:
        parts[at : at + 1] = missing
    rows, *rest = [each for each in parts if each is not None]
    if parts[0] is None or isinstance(rows, int):
        return flow.otherwise(flow, torch.Tensor.__getitem__, (input, index), {})
    sizes: list[int] = []
    positions: list[Positions | None] = []
    for part, size in zip(rest, input.sizes, strict=True):
        if isinstance(part, int) and not -size <= part < size:
            raise IndexError(f"index {part} is out of bounds for an axis of {size}")
        one = part % size if isinstance(part, int) else None
        asked = range(*part.indices(size)) if one is None else range(one, one + 1)
        sizes.append(len(asked))
        positions.append(None if asked == range(size) else asked.__getitem__)
    result = input
    if any(each is not None for each in positions):
        result = pick(flow, input, sizes, positions)
        # A slice is a view in the plain model. Where it had to be put together from several shards
        # it is a copy here, and a write to it would not reach the original.
        result.copied = any(
            ours.untyped_storage().data_ptr() != theirs.untyped_storage().data_ptr()
            for ours, theirs in zip(result.pieces, input.pieces, strict=True)
        )
    if rows != slice(None):
        result = Tile(
            flow,
            [piece[rows] for piece in result.pieces],
            result.sizes,
            result.axes,
            result.margin,
        )
    gone = [dim + 1 for dim, part in enumerate(rest) if isinstance(part, int)]
    result = squeeze(flow, result, gone) if gone else result
    for dim, part in enumerate(each for each in parts if not isinstance(each, int)):
        if part is None:
            result = unsqueeze(flow, result, dim)
    return result


def roll(
    flow: Flow,
    input: Tile,
    shifts: int | Sequence[int],
    dims: int | Sequence[int] | None = None,
) -> Any:
    """`torch.roll`; not over the samples."""
    if dims is None or dims == () or dims == []:
        return flow.otherwise(flow, torch.roll, (input, shifts), {})
    by = [shifts] if isinstance(shifts, int) else list(shifts)
    over = [position(each, input.dim()) for each in ([dims] if isinstance(dims, int) else dims)]
    if 0 in over or len(over) != len(by):
        return flow.otherwise(flow, torch.roll, (input, shifts, dims), {})
    positions: list[Positions | None] = [None] * len(input.axes)
    for dim in set(over):
        shift = sum(each for each, at in zip(by, over, strict=True) if at == dim)
        size = input.sizes[dim - 1]
        positions[dim - 1] = _rolled(shift, size)
    return pick(flow, input, input.sizes, positions)


def _rolled(shift: int, size: int) -> Positions:
    return lambda at: (at - shift) % size


def flip(flow: Flow, input: Tile, dims: Sequence[int]) -> Any:
    """`torch.flip`; not of the samples."""
    over = positions(dims, input.dim()) if dims else ()
    if 0 in over:
        return flow.otherwise(flow, torch.flip, (input, dims), {})
    picked: list[Positions | None] = [
        range(size - 1, -1, -1).__getitem__ if dim in over else None
        for dim, size in enumerate(input.sizes, start=1)
    ]
    return pick(flow, input, input.sizes, picked)


def channel_shuffle(flow: Flow, input: Tile, groups: int) -> Any:
    """`F.channel_shuffle`: the channels of all groups take turns."""
    channels = input.sizes[0]
    if len(input.axes) < 2 or groups < 1 or channels % groups:
        return flow.otherwise(flow, F.channel_shuffle, (input, groups), {})
    each = channels // groups
    positions: list[Positions | None] = [None] * len(input.axes)
    positions[0] = lambda at: at % groups * each + at // groups
    return pick(flow, input, input.sizes, positions)


def glu(flow: Flow, input: Tile, dim: int = -1) -> Any:
    """`F.glu`: one half gates the other."""
    at = position(dim, len(input.axes) + 1)
    if at == 0 or input.sizes[at - 1] % 2 or not input.sizes[at - 1]:
        return flow.otherwise(flow, F.glu, (input, dim), {})
    values, gates = chunk(flow, input, 2, dim)
    return values * gates.sigmoid()


def narrow(flow: Flow, input: Tile, dim: int, start: int, length: int) -> Any:
    """`torch.narrow`."""
    at = position(dim, len(input.axes) + 1)
    size = input.rows if at == 0 else input.sizes[at - 1]
    begin = start + size if start < 0 else start
    if not 0 <= begin <= begin + length <= size:
        return flow.otherwise(flow, torch.narrow, (input, dim, start, length), {})
    start = begin
    return getitem(flow, input, (slice(None),) * at + (slice(start, start + length),))


def split(flow: Flow, input: Tile, split_size: int | Sequence[int], dim: int = 0) -> Any:
    """`torch.split`."""
    at = position(dim, len(input.axes) + 1)
    size = input.rows if at == 0 else input.sizes[at - 1]
    if isinstance(split_size, int):
        if split_size < 1 or not size:
            return flow.otherwise(flow, torch.split, (input, split_size, dim), {})
        lengths = [min(split_size, size - start) for start in range(0, size, split_size)]
    else:
        lengths = list(split_size)
        if sum(lengths) != size or any(length < 0 for length in lengths):
            return flow.otherwise(flow, torch.split, (input, split_size, dim), {})
    starts = [sum(lengths[:index]) for index in range(len(lengths))]
    return tuple(
        narrow(flow, input, at, start, length)
        for start, length in zip(starts, lengths, strict=True)
    )


def chunk(flow: Flow, input: Tile, chunks: int, dim: int = 0) -> Any:
    """`torch.chunk`."""
    at = position(dim, len(input.axes) + 1)
    size = input.rows if at == 0 else input.sizes[at - 1]
    if chunks < 1 or not size:
        return flow.otherwise(flow, torch.chunk, (input, chunks, dim), {})
    return split(flow, input, -(-size // chunks), at)


def pad(
    flow: Flow,
    input: Tile,
    pad: Sequence[int],
    mode: str = "constant",
    value: float | None = None,
) -> Any:
    """`F.pad` of any mode."""
    positions: list[Positions | None] = [None] * len(input.axes)
    sizes = list(input.sizes)
    kinds = ("constant", "reflect", "replicate", "circular")
    known = mode in kinds and len(pad) % 2 == 0 and len(pad) // 2 <= len(input.axes)
    if mode != "constant" and (
        value is not None or min(pad, default=0) < 0 or len(pad) // 2 != len(input.axes) - 1
    ):
        known = False  # what torch takes for one sample, or has rules of its own for
    if not known:  # or of the batch too
        return flow.otherwise(flow, F.pad, (input, pad, mode, value), {})
    for index in range(len(pad) // 2):
        axis = len(input.axes) - 1 - index
        before, after = pad[2 * index], pad[2 * index + 1]
        if not before and not after:
            continue
        size = input.sizes[axis]
        sizes[axis] = size + before + after
        positions[axis] = _padded(mode, size, before, after)
        if sizes[axis] < 0 or (mode == "circular" and max(before, after) > size):
            return flow.otherwise(flow, F.pad, (input, pad, mode, value), {})
    return pick(flow, input, sizes, positions, 0.0 if value is None else value)


def _padded(mode: str, size: int, before: int, after: int) -> Positions:
    if mode == "reflect" and max(before, after) >= size:
        raise UserError(f"a reflection of {max(before, after)} needs more than {size} positions.")

    def constant(at: int) -> int:
        return at - before if before <= at < before + size else -1

    def reflect(at: int) -> int:
        inside = abs(at - before)
        return 2 * (size - 1) - inside if inside >= size else inside

    def replicate(at: int) -> int:
        return min(max(at - before, 0), size - 1)

    def circular(at: int) -> int:
        return (at - before) % size

    kinds: dict[str, Positions] = {
        "constant": constant,
        "reflect": reflect,
        "replicate": replicate,
        "circular": circular,
    }
    return kinds[mode]
