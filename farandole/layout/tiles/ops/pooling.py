"""Pools on tiles: beyond the image, a maximum sees −∞ and a mean counts as the layer says."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from farandole.errors import UserError
from farandole.layout.tiles.core.flow import Flow
from farandole.layout.tiles.core.grid import Box
from farandole.layout.tiles.core.intervals import Cells, Interval, Window
from farandole.layout.tiles.core.tile import Tile
from farandole.layout.tiles.halo.windows import WindowPart, are_numbers, numbers, windowed
from farandole.layout.tiles.ops.reductions import mean


def max_pool(
    spatial: int,
    flow: Flow,
    input: Tile,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Any:
    """`F.max_pool1d`, `max_pool2d` and `max_pool3d`."""
    if return_indices:  # they count positions of the whole image
        kind = _MAX_WITH_INDICES[spatial]
        options = {"stride": stride, "padding": padding, "dilation": dilation}
        return flow.otherwise(flow, kind, (input, kernel_size), {**options, "ceil_mode": ceil_mode})
    given = (input, kernel_size, stride, padding, dilation, ceil_mode)
    if not _fits(spatial, input, kernel_size, stride, padding, dilation):
        return flow.otherwise(flow, _MAX[spatial], given, {})
    kernel = numbers(kernel_size, spatial)
    strides = numbers(stride, spatial) if _is_given(stride) else kernel
    spacing = numbers(dilation, spatial)
    windows = _windows(kernel, strides, numbers(padding, spatial), spacing)

    def compute(part: WindowPart) -> torch.Tensor:
        return _MAX[spatial](part.source, kernel, strides, 0, spacing)

    sizes = _sizes(input, windows, ceil=ceil_mode)
    if min(sizes) < 1:
        return flow.otherwise(flow, _MAX[spatial], given, {})
    return windowed(flow, input, sizes, _needs(windows), compute, fill=-math.inf)


def avg_pool(
    spatial: int,
    flow: Flow,
    input: Tile,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Any:
    """`F.avg_pool1d`, `avg_pool2d` and `avg_pool3d`."""
    given = (input, kernel_size, stride, padding, ceil_mode, count_include_pad)
    options = {} if divisor_override is None else {"divisor_override": divisor_override}
    if not _fits(spatial, input, kernel_size, stride, padding, 1) or divisor_override == 0:
        return flow.otherwise(flow, _AVG[spatial], given, options)
    kernel = numbers(kernel_size, spatial)
    strides = numbers(stride, spatial) if _is_given(stride) else kernel
    pads = numbers(padding, spatial)
    windows = _windows(kernel, strides, pads, (1,) * spatial)

    def compute(part: WindowPart) -> torch.Tensor:
        result: torch.Tensor = _AVG[spatial](part.source, kernel, strides, 0)
        if divisor_override is not None:
            return result * (math.prod(kernel) / divisor_override)
        for axis, window in enumerate(windows):
            size = input.sizes[axis + 1]
            # A window that hangs over the end counts up to the end of the padding.
            most = Interval(-pads[axis], size + pads[axis])
            inside = most if count_include_pad else Interval(0, size)
            wanted = part.wanted[axis + 1]
            counts = [
                window.needs(Interval(at, at + 1)).meets(inside).length
                for at in range(wanted.start, wanted.stop)
            ]
            if any(count != window.kernel for count in counts):
                # Torch divides by the window's size. Windows at the edge count fewer positions, and
                # are scaled by what was divided too much, axis by axis.
                shares = [window.kernel / count for count in counts]
                result = result * _along(result, shares, axis + 2)
        return result

    sizes = _sizes(input, windows, ceil=ceil_mode)
    if min(sizes) < 1:
        return flow.otherwise(flow, _AVG[spatial], given, options)
    return windowed(flow, input, sizes, _needs(windows), compute)


def _fits(
    spatial: int, input: Tile, kernel_size: Any, stride: Any, padding: Any, dilation: Any
) -> bool:
    """Whether torch would take these arguments for a batch of images."""
    fits = (
        len(input.axes) == spatial + 1
        and input.numel() > 0
        and are_numbers(kernel_size, spatial, 1)
        and (not _is_given(stride) or are_numbers(stride, spatial, 1))
        and are_numbers(padding, spatial, 0)
        and are_numbers(dilation, spatial, 1)
    )
    return fits and all(
        2 * pad <= size
        for pad, size in zip(numbers(padding, spatial), numbers(kernel_size, spatial), strict=True)
    )


def _is_given(stride: Any) -> bool:
    return stride is not None and stride != () and stride != []


def lp_pool(
    spatial: int,
    flow: Flow,
    input: Tile,
    norm_type: float,
    kernel_size: Any,
    stride: Any = None,
    ceil_mode: bool = False,
) -> Any:
    """`F.lp_pool1d`, `lp_pool2d` and `lp_pool3d`: a mean of powers, as torch writes it."""
    if math.isinf(norm_type):
        _require_infinite_norms(flow, norm_type)
        sign = 1 if norm_type > 0 else -1
        sizes: Any = sign * input.abs()
        return sign * max_pool(spatial, flow, sizes, kernel_size, stride, 0, 1, ceil_mode)
    powers: Any = input.pow(norm_type)
    means = avg_pool(spatial, flow, powers, kernel_size, stride, 0, ceil_mode)
    count = math.prod(numbers(kernel_size, spatial))
    return (means.sign() * F.relu(means.abs())).mul(count).pow(1.0 / norm_type)


def _require_infinite_norms(flow: Flow, norm_type: float) -> None:
    """Older versions of torch take 0 as the root, and so give ones; with tiles it would be the
    maximum, and the model another one than on one device. Torch is asked, not its version."""
    if F.lp_pool1d(torch.full((1, 1, 1), 2.0), math.inf, 1).item() != 2.0:
        raise UserError(
            f"{flow.layer}: LPPool with norm_type={norm_type} is 1 everywhere in PyTorch "
            f"{torch.__version__}. Take a newer one, or MaxPool of x.abs()."
        )


def adaptive_avg_pool(spatial: int, flow: Flow, input: Tile, output_size: Any) -> Any:
    """`F.adaptive_avg_pool1d`, `adaptive_avg_pool2d` and `adaptive_avg_pool3d`."""
    if not _has_cells(spatial, input, output_size):
        return flow.otherwise(flow, _ADAPTIVE_AVG[spatial], (input, output_size), {})
    cells = _cells(input, output_size, spatial)
    if all(axis.outputs == 1 for axis in cells):  # one mean over the image, on every shard
        whole: Tile = mean(flow, input, tuple(range(2, 2 + spatial)), keepdim=True)
        return whole

    def compute(part: WindowPart) -> torch.Tensor:
        result = part.source
        for axis, each in enumerate(cells):
            shares = _shares(each, part.needed[axis + 1], part.wanted[axis + 1], result)
            result = torch.movedim(torch.movedim(result, axis + 2, -1) @ shares.T, -1, axis + 2)
        return result

    return windowed(flow, input, _cell_sizes(input, cells), _cell_needs(cells), compute)


def adaptive_max_pool(
    spatial: int, flow: Flow, input: Tile, output_size: Any, return_indices: bool = False
) -> Any:
    """`F.adaptive_max_pool1d`, `adaptive_max_pool2d` and `adaptive_max_pool3d`."""
    if return_indices:
        kind = _ADAPTIVE_WITH_INDICES[spatial]
        return flow.otherwise(flow, kind, (input, output_size), {})
    if not _has_cells(spatial, input, output_size):
        return flow.otherwise(flow, _ADAPTIVE_MAX[spatial], (input, output_size), {})
    cells = _cells(input, output_size, spatial)
    pool = _MAX[spatial]

    def compute(part: WindowPart) -> torch.Tensor:
        return _cell_by_cell(part, cells, pool, part.source, ())

    return windowed(flow, input, _cell_sizes(input, cells), _cell_needs(cells), compute)


def _cell_by_cell(
    part: WindowPart,
    cells: list[Cells],
    pool: Callable[..., torch.Tensor],
    source: torch.Tensor,
    lengths: tuple[int, ...],
) -> torch.Tensor:
    """Cells may have different sizes, so each is pooled alone: axis by axis, then all of it."""
    axis = len(lengths)
    if axis == len(cells):
        return pool(source, lengths)
    wanted, offset = part.wanted[axis + 1], part.needed[axis + 1].start
    results = []
    for at in range(wanted.start, wanted.stop):
        # Cells are given in positions of the whole image, and `source` begins at `offset` of it.
        cell = cells[axis].cell(at).moved(-offset)
        inside = source.narrow(axis + 2, cell.start, cell.length)
        results.append(_cell_by_cell(part, cells, pool, inside, (*lengths, cell.length)))
    return torch.cat(results, axis + 2)


def _windows(
    kernel: tuple[int, ...],
    strides: tuple[int, ...],
    pads: tuple[int, ...],
    spacing: tuple[int, ...],
) -> list[Window]:
    return [
        Window(size, step, pad, pad, gap)
        for size, step, pad, gap in zip(kernel, strides, pads, spacing, strict=True)
    ]


def _sizes(input: Tile, windows: list[Window], *, ceil: bool) -> tuple[int, ...]:
    lengths = (
        window.length(size, ceil=ceil)
        for window, size in zip(windows, input.sizes[1:], strict=True)
    )
    return (input.sizes[0], *lengths)


def _needs(windows: list[Window]) -> Callable[[Box], Box]:
    def needs(box: Box) -> Box:
        rest = (window.needs(each) for window, each in zip(windows, box[1:], strict=True))
        return (box[0], *rest)

    return needs


def _has_cells(spatial: int, input: Tile, output_size: Any) -> bool:
    """Whether an image of as many axes can be put in as many cells."""
    wanted = list(output_size) if isinstance(output_size, (tuple, list)) else [output_size]
    return (
        len(input.axes) == spatial + 1
        and input.numel() > 0
        and len(wanted) in ({1, spatial} if wanted == [output_size] else {spatial})
        and all(each is None or (type(each) is int and each > 0) for each in wanted)
    )


def _cells(input: Tile, output_size: Any, spatial: int) -> list[Cells]:
    wanted = (output_size,) * spatial if not isinstance(output_size, (tuple, list)) else output_size
    return [
        Cells(size, size if outputs is None else outputs)
        for size, outputs in zip(input.sizes[1:], wanted, strict=True)
    ]


def _cell_sizes(input: Tile, cells: list[Cells]) -> tuple[int, ...]:
    return (input.sizes[0], *(axis.outputs for axis in cells))


def _cell_needs(cells: list[Cells]) -> Callable[[Box], Box]:
    def needs(box: Box) -> Box:
        rest = (axis.needs(each) for axis, each in zip(cells, box[1:], strict=True))
        return (box[0], *rest)

    return needs


def _shares(cells: Cells, needed: Interval, wanted: Interval, like: torch.Tensor) -> torch.Tensor:
    """For each wanted output, what each needed input counts in its mean."""
    shares = torch.zeros(wanted.length, needed.length, dtype=like.dtype)
    for row, at in enumerate(range(wanted.start, wanted.stop)):
        cell = cells.cell(at)
        shares[row, cell.moved(-needed.start).slice] = 1.0 / cell.length
    return shares.to(like.device)


def _along(like: torch.Tensor, values: list[float], dim: int) -> torch.Tensor:
    shape = [1] * like.dim()
    shape[dim] = len(values)
    return torch.tensor(values, dtype=like.dtype, device=like.device).reshape(shape)


def each_dimension(handler: Callable[..., Any]) -> list[Callable[..., Any]]:
    """A handler for images of one, two and three axes."""
    return [partial(handler, spatial) for spatial in (1, 2, 3)]


_MAX: dict[int, Callable[..., torch.Tensor]] = {
    1: F.max_pool1d,
    2: F.max_pool2d,
    3: F.max_pool3d,
}
_AVG: dict[int, Callable[..., torch.Tensor]] = {
    1: F.avg_pool1d,
    2: F.avg_pool2d,
    3: F.avg_pool3d,
}
_ADAPTIVE_AVG: dict[int, Callable[..., torch.Tensor]] = {
    1: F.adaptive_avg_pool1d,
    2: F.adaptive_avg_pool2d,
    3: F.adaptive_avg_pool3d,
}
_ADAPTIVE_MAX: dict[int, Callable[..., torch.Tensor]] = {
    1: F.adaptive_max_pool1d,
    2: F.adaptive_max_pool2d,
    3: F.adaptive_max_pool3d,
}
_MAX_WITH_INDICES: dict[int, Callable[..., Any]] = {
    1: F.max_pool1d_with_indices,
    2: F.max_pool2d_with_indices,
    3: F.max_pool3d_with_indices,
}
_ADAPTIVE_WITH_INDICES: dict[int, Callable[..., Any]] = {
    1: F.adaptive_max_pool1d_with_indices,
    2: F.adaptive_max_pool2d_with_indices,
    3: F.adaptive_max_pool3d_with_indices,
}
