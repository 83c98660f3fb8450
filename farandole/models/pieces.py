"""The small pieces every model family shares.

A model is a plain `nn.Sequential` of named blocks, so that a layout can cut it with a slice:
`model[:k]` and `model[k:]` are two stages whose parameters keep the names they have in the whole.
That is why the pieces below are functions that return `nn.Sequential`, not subclasses of it:
slicing a subclass calls its constructor, which would have other arguments.

In-place ReLUs only ever overwrite a tensor made in the same block. What a block receives it leaves
as it was: a pipeline stage must keep its input for the backward pass or to compute again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from farandole.errors import UserError

Side = int | tuple[int, int]


def sequence(blocks: Iterable[tuple[str, nn.Module]]) -> nn.Sequential:
    """An `nn.Sequential` of named blocks, run in order."""
    return nn.Sequential(OrderedDict(blocks))


def conv_norm_relu(
    channels_in: int,
    channels_out: int,
    kernel: Side,
    *,
    stride: int = 1,
    padding: Side | None = None,
    eps: float = 1e-5,
) -> nn.Sequential:
    """Convolution without bias, BatchNorm, ReLU; by default padded to keep the image size."""
    return sequence(
        [
            ("conv", conv(channels_in, channels_out, kernel, stride=stride, padding=padding)),
            ("norm", nn.BatchNorm2d(channels_out, eps=eps)),
            ("relu", nn.ReLU(inplace=True)),
        ]
    )


def conv(
    channels_in: int,
    channels_out: int,
    kernel: Side,
    *,
    stride: Side = 1,
    padding: Side | None = None,
) -> nn.Conv2d:
    """A convolution without bias, for use next to a BatchNorm; `padding=None` keeps the size."""
    height, width = (kernel, kernel) if isinstance(kernel, int) else kernel
    if padding is None:
        padding = (height // 2, width // 2)
    return nn.Conv2d(channels_in, channels_out, (height, width), stride, padding, bias=False)


class Branches(nn.Module):
    """Runs every branch on the same input and joins their outputs along the channels."""

    def __init__(self, **branches: nn.Module) -> None:
        super().__init__()
        for name, branch in branches.items():
            self.add_module(name, branch)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self.children()], dim=1)


def pooled_head(channels: int, classes: int, *, dropout: float = 0.0) -> nn.Sequential:
    """The usual last block: mean over the image, dropout if any, one linear layer."""
    return sequence(
        [
            ("pool", nn.AdaptiveAvgPool2d(1)),
            ("flatten", nn.Flatten()),
            *([("dropout", nn.Dropout(dropout))] if dropout else []),
            ("linear", nn.Linear(channels, classes)),
        ]
    )


def side_after(side: int, *, kernel: int, stride: int, padding: int = 0) -> int:
    """The side of a square image after a convolution or a pooling."""
    return (side + 2 * padding - kernel) // stride + 1


def check_request(
    model: str, *, classes: int, channels: int, image_size: int, smallest_image: int
) -> None:
    """Raises `UserError` unless `model` can be built for these classes, channels and images."""
    if classes < 1:
        raise UserError(f"{model}: classes={classes}; a classifier needs at least 1 class.")
    if channels < 1:
        raise UserError(
            f"{model}: channels={channels}; an image has at least 1 channel (grey 1, colour 3)."
        )
    if image_size < smallest_image:
        raise UserError(
            f"{model}: image_size={image_size} is too small, it needs at least {smallest_image} "
            f"(pixels a side). Give image_size={smallest_image} or more, or take a model for "
            f"small images such as small_cnn."
        )


def initialise_he(model: nn.Module) -> None:
    """He et al. 2015 for convolutions (by fan-out), N(0, 0.01²) for linear layers, biases 0."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        elif isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.01)
        else:
            continue
        if module.bias is not None:
            nn.init.zeros_(module.bias)


def initialise_normal(model: nn.Module, std: float) -> None:
    """N(0, `std`²) for convolutions and linear layers, biases 0."""
    for module in model.modules():
        if isinstance(module, (nn.Conv2d, nn.Linear)):
            nn.init.normal_(module.weight, std=std)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
