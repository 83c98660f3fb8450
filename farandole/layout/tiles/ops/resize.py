"""Images made larger or smaller: `F.interpolate`, and pixels that become channels and back.

Where an output comes from is torch's own formula, in positions of the whole image, and in the
precision that torch computes it in.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from farandole.layout.tiles.core.flow import Flow
from farandole.layout.tiles.core.frames import whole_along
from farandole.layout.tiles.core.grid import Box
from farandole.layout.tiles.core.intervals import Interval
from farandole.layout.tiles.core.tile import Tile
from farandole.layout.tiles.halo.windows import WindowPart, windowed
from farandole.layout.tiles.ops.pooling import adaptive_avg_pool
from farandole.layout.tiles.ops.shapes import regained

_LINEAR = ("linear", "bilinear", "trilinear")


class _Axis(NamedTuple):
    """For every output: the input it comes from, and how much of the next one is in it."""

    first: list[int]
    second: list[int]
    share: torch.Tensor | None  # of the second; None: there is but one

    def needs(self, output: Interval) -> Interval:
        return Interval(self.first[output.start], self.second[output.stop - 1] + 1)


def interpolate(
    flow: Flow,
    input: Tile,
    size: Any = None,
    scale_factor: Any = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> Any:
    """`F.interpolate`, nearest, linear and by area."""
    spatial = len(input.axes) - 1
    fits = spatial in (1, 2, 3) and input.numel() > 0
    given = {
        "size": size,
        "scale_factor": scale_factor,
        "mode": mode,
        "align_corners": align_corners,
        "recompute_scale_factor": recompute_scale_factor,
        "antialias": antialias,
    }
    known = mode in ("nearest", "nearest-exact", "area") or (fits and mode == _LINEAR[spatial - 1])
    corners_fit = align_corners is None or mode in _LINEAR
    if (
        not fits
        or not known
        or not corners_fit
        or antialias
        or (size is None) == (scale_factor is None)
    ):
        return flow.otherwise(flow, F.interpolate, (input,), given)
    keeps_scale = not recompute_scale_factor and mode != "area"
    lengths, scales = _lengths(input, size, scale_factor, keeps_scale)
    if min(lengths) < 1 or len(lengths) != spatial:
        return flow.otherwise(flow, F.interpolate, (input,), given)
    if mode == "area":
        return adaptive_avg_pool(spatial, flow, input, lengths)
    kind = torch.float64 if input.dtype == torch.float64 else torch.float32
    axes = [
        _nearest(mode, spatial, old, new, scale, kind, input.device)
        if mode.startswith("nearest")
        else _linear(old, new, scale, bool(align_corners), kind)
        for old, new, scale in zip(input.sizes[1:], lengths, scales, strict=True)
    ]
    changed = [at + 2 for at in range(spatial) if lengths[at] != input.sizes[at + 1]]
    # One pixel becomes an image again: shards that had it whole need only their part.
    single = [at for at in changed if input.sizes[at - 1] == 1]
    input = whole_along(input, single)

    def needs(box: Box) -> Box:
        rest = (axis.needs(each) for axis, each in zip(axes, box[1:], strict=True))
        return (box[0], *rest)

    factors = _factors(input.sizes[1:], lengths, scales)

    def compute(part: WindowPart) -> torch.Tensor:
        # By whole factors, an output's source depends on its distance from its own input alone. So
        # a tile is enlarged like an image, and the overhang is cut off.
        if factors is not None and not align_corners:
            return _enlarged(part, factors, mode)
        result = part.source
        for at, axis in enumerate(axes, start=1):
            result = _along(result, at + 1, axis, part.needed[at].start, part.wanted[at])
        return result

    divided = regained(flow, input.axes, single)
    return windowed(flow, input, (input.sizes[0], *lengths), needs, compute, axes=divided)


def _enlarged(part: WindowPart, factors: Sequence[int], mode: str) -> torch.Tensor:
    """Every tile is enlarged alike, by whole numbers: torch does it at once."""
    result = F.interpolate(
        part.source,
        scale_factor=[float(by) for by in factors],
        mode=mode,
        align_corners=None if mode.startswith("nearest") else False,
    )
    for at, by in enumerate(factors, start=1):
        wanted, start = part.wanted[at], part.needed[at].start * by
        result = result.narrow(at + 1, wanted.start - start, wanted.length)
    return result


def _lengths(
    input: Tile, size: Any, scale_factor: Any, keeps_scale: bool
) -> tuple[list[int], Sequence[float | None]]:
    """The sizes of the result, and by how much torch takes each axis to grow; None: as they say."""
    spatial = len(input.axes) - 1
    if size is not None:
        return [int(each) for each in _each(size, spatial)], (None,) * spatial
    wanted = [float(each) for each in _each(scale_factor, spatial)]
    lengths = [int(old * by) for old, by in zip(input.sizes[1:], wanted, strict=True)]
    return lengths, wanted if keeps_scale else (None,) * spatial


def pixel_shuffle(flow: Flow, input: Tile, upscale_factor: int) -> Any:
    """`F.pixel_shuffle`: channels become pixels."""
    by = upscale_factor
    if len(input.axes) != 3 or by < 1 or input.sizes[0] % (by * by) or not input.numel():
        return flow.otherwise(flow, F.pixel_shuffle, (input, by), {})
    channels, *image = input.sizes

    def needs(box: Box) -> Box:
        rest = (Interval(each.start // by, -(-each.stop // by)) for each in box[1:])
        return (Interval(box[0].start * by * by, box[0].stop * by * by), *rest)

    def compute(part: WindowPart) -> torch.Tensor:
        result = F.pixel_shuffle(part.source, by)
        for at in (1, 2):
            wanted = part.wanted[at]
            result = result.narrow(at + 1, wanted.start - part.needed[at].start * by, wanted.length)
        return result

    sizes = (channels // (by * by), *(size * by for size in image))
    return windowed(flow, input, sizes, needs, compute)


def pixel_unshuffle(flow: Flow, input: Tile, downscale_factor: int) -> Any:
    """`F.pixel_unshuffle`: pixels become channels."""
    by = downscale_factor
    fits = len(input.axes) == 3 and by >= 1 and input.numel() > 0
    if not fits or any(size % by for size in input.sizes[1:]):
        return flow.otherwise(flow, F.pixel_unshuffle, (input, by), {})
    channels, *image = input.sizes

    def needs(box: Box) -> Box:
        rest = (Interval(each.start * by, each.stop * by) for each in box[1:])
        inside = Interval(box[0].start // (by * by), -(-box[0].stop // (by * by)))
        return (inside, *rest)

    def compute(part: WindowPart) -> torch.Tensor:
        result = F.pixel_unshuffle(part.source, by)
        wanted = part.wanted[0]
        return result.narrow(1, wanted.start - part.needed[0].start * by * by, wanted.length)

    sizes = (channels * by * by, *(size // by for size in image))
    return windowed(flow, input, sizes, needs, compute)


def _each(value: Any, spatial: int) -> Sequence[Any]:
    return value if isinstance(value, (list, tuple)) else (value,) * spatial


def _factors(
    old: Sequence[int], new: Sequence[int], scales: Sequence[float | None]
) -> list[int] | None:
    """By how much an image is enlarged along its axes, if those are whole numbers."""
    found = []
    for size, length, scale in zip(old, new, scales, strict=True):
        by = length // size if size else 0
        if by < 1 or by * size != length or scale not in (None, by):
            return None
        found.append(by)
    return found


def _nearest(
    mode: str,
    spatial: int,
    old: int,
    new: int,
    scale: float | None,
    kind: torch.dtype,
    device: torch.device,
) -> _Axis:
    """Torch is asked itself, with positions for an image of as many axes: it has shortcuts that
    round otherwise, and not the same ones for lines, images and volumes."""
    ones = [1] * (spatial - 1)
    line = torch.arange(old, dtype=kind, device=device).reshape(1, 1, *ones, old)
    options: dict[str, Any] = (
        {"size": [*ones, new]} if scale is None else {"scale_factor": [*map(float, ones), scale]}
    )
    found = F.interpolate(line, mode=mode, **options).flatten().long().tolist()
    return _Axis(found, found, None)


def _linear(old: int, new: int, scale: float | None, corners: bool, kind: torch.dtype) -> _Axis:
    at = torch.arange(new, dtype=kind)
    if new == old:  # enlarged by too little, perhaps, to get longer: torch copies
        return _Axis(list(range(old)), list(range(old)), None)
    if corners:
        step = torch.tensor(old - 1, dtype=kind) / (new - 1) if new > 1 else torch.zeros(1)
        source = at * step.to(kind)
    else:
        step = (
            torch.tensor(1.0 / scale, dtype=kind)
            if scale is not None
            else torch.tensor(old, dtype=kind) / new
        )
        source = (step * (at + 0.5) - 0.5).clamp(min=0)
    first = source.long().clamp(max=old - 1)
    second = (first + 1).clamp(max=old - 1)
    share = (source - first).clamp(0, 1)
    return _Axis(first.tolist(), second.tolist(), share)


def _along(
    source: torch.Tensor, dim: int, axis: _Axis, start: int, wanted: Interval
) -> torch.Tensor:
    """One axis of an image that begins at `start`."""
    first = _picked(source, dim, [at - start for at in axis.first[wanted.slice]])
    if axis.share is None:
        return first
    second = _picked(source, dim, [at - start for at in axis.second[wanted.slice]])
    shape = [1] * source.dim()
    shape[dim] = wanted.length
    share = axis.share[wanted.slice].to(source.device, source.dtype).reshape(shape)
    return torch.lerp(first, second, share)


def _picked(source: torch.Tensor, dim: int, places: list[int]) -> torch.Tensor:
    if places == list(range(source.shape[dim])):
        return source
    return source.index_select(dim, torch.tensor(places, device=source.device))
