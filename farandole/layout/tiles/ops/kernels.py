"""One convolution on one box of an image: its outputs, and both of its gradients. No shards here.

Zeros that are wanted on both sides of an axis alike need not be put there: they are given to torch
as padding. So a tile is often convolved as it lies in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from farandole.layout.tiles.core.grid import Box
from farandole.layout.tiles.core.intervals import Interval, Window


class ChannelGroups(NamedTuple):
    """Which channels belong together."""

    inputs: int
    outputs: int
    groups: int

    def count(self, outputs: Interval) -> int:
        """Groups of whole groups' outputs."""
        return max(1, outputs.length * self.groups // self.outputs)

    def whole(self, outputs: Interval) -> Interval:
        """These outputs, and all others of their groups; without groups, just these."""
        if self.groups == 1:
            return outputs
        each = self.outputs // self.groups
        return Interval(outputs.start // each * each, -(-outputs.stop // each) * each)

    def needs(self, outputs: Interval) -> Interval:
        if self.groups == 1:
            return Interval(0, self.inputs)
        each = self.outputs // self.groups
        inside = self.whole(outputs)
        inputs = self.inputs // self.groups
        return Interval(inside.start // each * inputs, inside.stop // each * inputs)


class Kernel(NamedTuple):
    """What a convolution looks at: a window along each axis of the image, and which channels."""

    windows: tuple[Window, ...]
    channels: ChannelGroups

    def needs(self, outputs: Box) -> Box:
        rest = (window.needs(each) for window, each in zip(self.windows, outputs[1:], strict=True))
        return (self.channels.needs(outputs[0]), *rest)

    def outputs(
        self,
        slab: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        channels: Interval,
        padding: Sequence[int],
    ) -> torch.Tensor:
        """Some channels of the output, of a slab with all that they need."""
        whole = self.channels.whole(channels)
        result = _CONV[len(self.windows)](
            slab,
            weight[whole.slice],
            None if bias is None else bias[whole.slice],
            stride=self._strides,
            padding=tuple(padding),
            dilation=self._dilations,
            groups=self.channels.count(whole),
        )
        return result[:, channels.moved(-whole.start).slice] if channels != whole else result

    def input_gradient(
        self,
        gradient: torch.Tensor,
        shape: Sequence[int],
        weight: torch.Tensor,
        channels: Interval,
        padding: Sequence[int],
    ) -> torch.Tensor:
        """Of a slab of this shape, from the gradient of the outputs' channels."""
        slab = gradient.new_empty(1).expand(tuple(shape))  # only its shape is looked at
        mask = (True, False, False)
        result, _, _ = self._backward(gradient, slab, weight, channels, padding, mask)
        return result

    def weight_gradient(
        self,
        gradient: torch.Tensor,
        slab: torch.Tensor,
        weight: torch.Tensor,
        channels: Interval,
        padding: Sequence[int],
    ) -> torch.Tensor:
        """Of the rows of the weight that these channels of the output have."""
        mask = (False, True, False)
        _, result, _ = self._backward(gradient, slab, weight, channels, padding, mask)
        whole = self.channels.whole(channels)
        return result[channels.moved(-whole.start).slice]

    def _backward(
        self,
        gradient: torch.Tensor,
        slab: torch.Tensor,
        weight: torch.Tensor,
        channels: Interval,
        padding: Sequence[int],
        mask: tuple[bool, bool, bool],
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        whole = self.channels.whole(channels)
        # Zeros stand for the gradients of those: their part of the sums is computed by the shards
        # that own them.
        if channels != whole:  # a group whose other outputs are computed elsewhere
            around = (channels.start - whole.start, whole.stop - channels.stop)
            gradient = F.pad(gradient, (0, 0) * len(self.windows) + around)
        results: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
        results = torch.ops.aten.convolution_backward(
            gradient,
            slab,
            weight[whole.slice],
            [whole.length],
            self._strides,
            tuple(padding),
            self._dilations,
            False,  # transposed
            (0,) * len(self.windows),
            self.channels.count(whole),
            mask,
        )
        return results

    @property
    def _strides(self) -> tuple[int, ...]:
        return tuple(window.stride for window in self.windows)

    @property
    def _dilations(self) -> tuple[int, ...]:
        return tuple(window.dilation for window in self.windows)


_CONV: dict[int, Callable[..., torch.Tensor]] = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
