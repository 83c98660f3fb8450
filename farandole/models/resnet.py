"""Residual networks: ResNet-18 and -50 (He et al. 2016a), ResNet-110-v2 (He et al. 2016b).

One residual block is one block of the sequence; the addition happens inside it.

ResNet-18 and -50 shrink their input by 32, which leaves nothing of a small image. The rule here:
images under 64 pixels a side get a small stem, one 3×3 convolution at full resolution and no
max-pooling, as is usual for CIFAR.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn import functional as F

from farandole.models.pieces import (
    check_request,
    conv,
    conv_norm_relu,
    initialise_he,
    pooled_head,
    sequence,
)

SMALL_STEM_BELOW_PIXELS = 64


def resnet18(
    *, classes: int = 1000, image_size: int = 224, channels: int = 3, zero_residual: bool = False
) -> nn.Sequential:
    """ResNet-18; 11,689,512 parameters with the defaults, 11,173,962 for 10 classes at 32×32.

    `zero_residual` starts every block as the identity, part of the large-batch recipe of Goyal
    et al. 2017.
    """
    check_request(
        "resnet18", classes=classes, channels=channels, image_size=image_size, smallest_image=8
    )
    return _resnet(
        _basic, 1, (2, 2, 2, 2), classes, image_size, channels, zero_residual=zero_residual
    )


def resnet50(
    *, classes: int = 1000, image_size: int = 224, channels: int = 3, zero_residual: bool = False
) -> nn.Sequential:
    """ResNet-50; 25,557,032 parameters with the defaults. `zero_residual` as in `resnet18`.

    The stride sits in the 3×3 convolution of a block, as in every current implementation ("v1.5").
    """
    check_request(
        "resnet50", classes=classes, channels=channels, image_size=image_size, smallest_image=8
    )
    return _resnet(
        _bottleneck, 4, (3, 4, 6, 3), classes, image_size, channels, zero_residual=zero_residual
    )


def resnet110_v2(*, classes: int = 10, image_size: int = 32, channels: int = 3) -> nn.Sequential:
    """The pre-activation ResNet-110 for CIFAR; 1,727,962 parameters with the defaults.

    Two 3×3 convolutions a unit, 18 units in each of three stages, parameter-free shortcuts.
    """
    check_request(
        "resnet110_v2", classes=classes, channels=channels, image_size=image_size, smallest_image=4
    )
    # The activation behind the first convolution comes before the paths part, so it belongs to
    # the stem and the first unit starts with its convolution (He et al. 2016b, appendix).
    blocks: list[tuple[str, nn.Module]] = [("stem", conv_norm_relu(channels, 16, 3))]
    width_in = 16
    for stage, width in enumerate((16, 32, 64), start=1):
        for unit in range(1, 19):
            stride = 2 if stage > 1 and unit == 1 else 1
            activate = not (stage == 1 and unit == 1)
            blocks.append(
                (
                    f"stage{stage}_unit{unit}",
                    PreActivationUnit(width_in, width, stride, activate=activate),
                )
            )
            width_in = width
    blocks += [("activation", _norm_relu(64)), ("head", pooled_head(64, classes))]
    model = sequence(blocks)
    initialise_he(model)
    return model


class ResidualBlock(nn.Module):
    """ReLU of the residual path plus the shortcut."""

    def __init__(self, residual: nn.Sequential, shortcut: nn.Module) -> None:
        super().__init__()
        self.residual = residual
        self.shortcut = shortcut

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.residual(x) + self.shortcut(x), inplace=True)


class PreActivationUnit(nn.Module):
    """Activation before convolution, and nothing but additions on the shortcut.

    Where a stage halves the image and doubles the channels, the shortcut takes every other pixel
    and fills the new channels with zeros, so it has no parameters.
    """

    def __init__(self, channels_in: int, channels_out: int, stride: int, *, activate: bool) -> None:
        super().__init__()
        self.stride = stride
        self.new_channels = channels_out - channels_in
        self.residual = sequence(
            [
                *([("activation1", _norm_relu(channels_in))] if activate else []),
                ("conv1", conv(channels_in, channels_out, 3, stride=stride)),
                ("activation2", _norm_relu(channels_out)),
                ("conv2", conv(channels_out, channels_out, 3)),
            ]
        )

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x
        if self.stride > 1:
            shortcut = x[:, :, :: self.stride, :: self.stride]
        if self.new_channels:
            shortcut = F.pad(shortcut, (0, 0, 0, 0, 0, self.new_channels))
        return self.residual(x) + shortcut  # type: ignore[no-any-return]


def _resnet(
    residual_path: Callable[[int, int, int], nn.Sequential],
    expansion: int,
    blocks_in_stage: tuple[int, ...],
    classes: int,
    image_size: int,
    channels: int,
    *,
    zero_residual: bool,
) -> nn.Sequential:
    blocks: list[tuple[str, nn.Module]] = [("stem", _stem(channels, image_size))]
    channels_in = 64
    for stage, count in enumerate(blocks_in_stage, start=1):
        width = 64 * 2 ** (stage - 1)
        channels_out = width * expansion
        for index in range(1, count + 1):
            stride = 2 if stage > 1 and index == 1 else 1
            shortcut: nn.Module = nn.Identity()
            if stride > 1 or channels_in != channels_out:
                shortcut = sequence(
                    [
                        ("conv", conv(channels_in, channels_out, 1, stride=stride)),
                        ("norm", nn.BatchNorm2d(channels_out)),
                    ]
                )
            residual = residual_path(channels_in, width, stride)
            blocks.append((f"stage{stage}_block{index}", ResidualBlock(residual, shortcut)))
            channels_in = channels_out
    blocks.append(("head", pooled_head(channels_in, classes)))
    model = sequence(blocks)
    initialise_he(model)
    if zero_residual:
        for block in model:
            if isinstance(block, ResidualBlock):
                last_norm = block.residual[-1]
                assert isinstance(last_norm, nn.BatchNorm2d)
                nn.init.zeros_(last_norm.weight)
    return model


def _stem(channels: int, image_size: int) -> nn.Sequential:
    if image_size < SMALL_STEM_BELOW_PIXELS:
        return conv_norm_relu(channels, 64, 3)
    stem = conv_norm_relu(channels, 64, 7, stride=2)
    stem.add_module("pool", nn.MaxPool2d(3, stride=2, padding=1))
    return stem


def _basic(channels_in: int, width: int, stride: int) -> nn.Sequential:
    return sequence(
        [
            ("conv1", conv_norm_relu(channels_in, width, 3, stride=stride)),
            ("conv2", conv(width, width, 3)),
            ("norm2", nn.BatchNorm2d(width)),
        ]
    )


def _bottleneck(channels_in: int, width: int, stride: int) -> nn.Sequential:
    return sequence(
        [
            ("conv1", conv_norm_relu(channels_in, width, 1)),
            ("conv2", conv_norm_relu(width, width, 3, stride=stride)),
            ("conv3", conv(width, 4 * width, 1)),
            ("norm3", nn.BatchNorm2d(4 * width)),
        ]
    )


def _norm_relu(channels: int) -> nn.Sequential:
    return sequence([("norm", nn.BatchNorm2d(channels)), ("relu", nn.ReLU(inplace=True))])
