"""Convolutions on tiles, plain and transposed, in any number of dimensions.

Channels are an axis like the others: a shard that owns some of the output channels needs the input
channels of their groups, and uses those rows of the weight.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from farandole.layout.tiles.core.flow import Flow
from farandole.layout.tiles.core.grid import Box
from farandole.layout.tiles.core.intervals import Interval, TransposedWindow, Window
from farandole.layout.tiles.core.tile import Tile
from farandole.layout.tiles.halo.overlapped import convolve
from farandole.layout.tiles.halo.windows import (
    WindowPart,
    are_numbers,
    next_output_parts,
    numbers,
    windowed,
)
from farandole.layout.tiles.ops.kernels import ChannelGroups, Kernel


def conv(
    spatial: int,
    flow: Flow,
    input: Tile,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Any:
    """`torch.conv1d`, `conv2d` and `conv3d`."""
    given = (input, weight, bias, stride, padding, dilation, groups)
    fits = _pads(padding, stride, spatial) and _outputs(
        spatial, input, weight, bias, groups, (stride, dilation), transposed=False
    )
    if not fits:  # torch has its own words for it, or takes it for one sample
        return flow.otherwise(flow, _CONV[spatial], given, {})
    windows = _windows(weight, stride, padding, dilation)
    kernel = Kernel(windows, ChannelGroups(input.sizes[0], weight.shape[0], groups))
    sizes = (
        weight.shape[0],
        *(window.length(size) for window, size in zip(windows, input.sizes[1:], strict=True)),
    )
    if min(sizes) < 1:
        return flow.otherwise(flow, _CONV[spatial], given, {})

    def compute(part: WindowPart) -> torch.Tensor:
        return kernel.outputs(part.source, weight, bias, part.wanted[0], (0,) * len(windows))

    if flow.record is not None or input.is_complex():
        # While layers are recorded, they are timed without the wait for their halos. The gradients
        # of complex numbers are torch's.
        return windowed(flow, input, sizes, kernel.needs, compute)
    parts = next_output_parts(flow, input, sizes, kernel.needs, input.axes)
    pieces = convolve(flow, input, kernel, parts, weight, bias)
    return Tile(flow, pieces, sizes, input.axes, parts.margin)


def conv_transpose(
    spatial: int,
    flow: Flow,
    input: Tile,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> Any:
    """`torch.conv_transpose1d`, `conv_transpose2d` and `conv_transpose3d`."""
    given = (input, weight, bias, stride, padding, output_padding, groups, dilation)
    run = _CONV_TRANSPOSE[spatial]
    fits = (
        are_numbers(padding, spatial, 0)
        and are_numbers(output_padding, spatial, 0)
        and _outputs(spatial, input, weight, bias, groups, (stride, dilation), transposed=True)
        and all(
            more < max(step, spacing)
            for more, step, spacing in zip(
                *(numbers(each, spatial) for each in (output_padding, stride, dilation)),
                strict=True,
            )
        )
    )
    if not fits:
        return flow.otherwise(flow, run, given, {})
    strides, dilations = numbers(stride, spatial), numbers(dilation, spatial)
    windows = [
        TransposedWindow(*each)
        for each in zip(
            weight.shape[2:],
            strides,
            numbers(padding, spatial),
            numbers(output_padding, spatial),
            dilations,
            strict=True,
        )
    ]
    channels = ChannelGroups(input.sizes[0], weight.shape[1] * groups, groups)
    sizes = (
        channels.outputs,
        *(window.length(size) for window, size in zip(windows, input.sizes[1:], strict=True)),
    )
    if min(sizes) < 1:
        return flow.otherwise(flow, run, given, {})
    kernel = _TransposedKernel(run, windows, channels, strides, dilations)
    return windowed(flow, input, sizes, kernel.needs, partial(kernel.outputs, weight, bias))


class _TransposedKernel(NamedTuple):
    """A transposed convolution: each input is spread over several outputs."""

    run: Callable[..., torch.Tensor]
    windows: Sequence[TransposedWindow]  # one for each axis of the image
    channels: ChannelGroups
    strides: Sequence[int]
    dilations: Sequence[int]

    def needs(self, box: Box) -> Box:
        # Where nothing is spread to an output, one input is asked for all the same: of zero length
        # nothing can be computed. It is cropped away, or lies beyond the image and is zero.
        found = (window.needs(each) for window, each in zip(self.windows, box[1:], strict=True))
        rest = (Interval(need.start, max(need.stop, need.start + 1)) for need in found)
        return (self.channels.needs(box[0]), *rest)

    def outputs(
        self, weight: torch.Tensor, bias: torch.Tensor | None, part: WindowPart
    ) -> torch.Tensor:
        """The wanted outputs of one shard, from the inputs that they need."""
        inside = self.channels.whole(part.wanted[0])
        rows = self.channels.needs(part.wanted[0])
        result = self.run(
            part.source,
            weight[:, inside.slice] if self.channels.groups == 1 else weight[rows.slice],
            None,
            stride=self.strides,
            dilation=self.dilations,
            groups=self.channels.count(inside),
        )
        # The result begins where the first needed input is spread to, and not where the wanted
        # outputs do: what other shards own is cut off on both sides.
        result = _cropped(result, 1, part.wanted[0], inside.start)
        for axis, window in enumerate(self.windows, start=1):
            wanted = part.wanted[axis]
            result = _cropped(result, axis + 1, wanted, window.begins(part.needed[axis].start))
        if bias is not None:
            result = result + bias[part.wanted[0].slice].reshape(-1, *(1,) * len(self.windows))
        return result


def _outputs(
    spatial: int,
    input: Tile,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    groups: int,
    steps: tuple[Any, Any],
    *,
    transposed: bool,
) -> int:
    """The channels of the result; 0: the arguments do not fit together."""
    fits = (
        len(input.axes) == spatial + 1
        and weight.dim() == spatial + 2
        and groups > 0
        and all(are_numbers(each, spatial, 1) for each in steps)
        and input.numel() > 0
        and weight.numel() > 0
    )
    if not fits:
        return 0
    inputs, outputs = weight.shape[1] * groups, weight.shape[0]
    if transposed:
        inputs, outputs = outputs, inputs
    fits = inputs == input.sizes[0] and weight.shape[0] % groups == 0
    fits = fits and (bias is None or bias.shape == (outputs,))
    return outputs if fits else 0


def _pads(padding: Any, stride: Any, spatial: int) -> bool:
    if padding == "same":
        return are_numbers(stride, spatial, 1) and set(numbers(stride, spatial)) == {1}
    return padding == "valid" or are_numbers(padding, spatial, 0)


def _windows(weight: torch.Tensor, stride: Any, padding: Any, dilation: Any) -> tuple[Window, ...]:
    spatial = weight.dim() - 2
    windows = []
    for axis, (step, spacing) in enumerate(
        zip(numbers(stride, spatial), numbers(dilation, spatial), strict=True)
    ):
        kernel = weight.shape[axis + 2]
        if padding == "valid":
            before = after = 0
        elif padding == "same":
            # Torch puts the odd one of an uneven number of zeros behind the image.
            both = spacing * (kernel - 1)
            before, after = both // 2, both - both // 2
        else:
            before = after = numbers(padding, spatial)[axis]
        windows.append(Window(kernel, step, before, after, spacing))
    return tuple(windows)


def _cropped(result: torch.Tensor, dim: int, wanted: Interval, start: int) -> torch.Tensor:
    """The wanted part of a result that begins at `start`; what is behind its end is zero."""
    offset = wanted.start - start
    before, after = max(0, -offset), max(0, offset + wanted.length - result.shape[dim])
    if before or after:
        result = F.pad(result, (0, 0) * (result.dim() - dim - 1) + (before, after))
    if offset + before == 0 and result.shape[dim] == wanted.length:
        return result
    return result.narrow(dim, offset + before, wanted.length)


_CONV: dict[int, Callable[..., torch.Tensor]] = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_CONV_TRANSPOSE: dict[int, Callable[..., torch.Tensor]] = {
    1: F.conv_transpose1d,
    2: F.conv_transpose2d,
    3: F.conv_transpose3d,
}
