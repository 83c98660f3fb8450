"""The U-Net (Ronneberger, Fischer and Brox 2015): a class for every pixel, at the input's size.

The image is halved `depth` times and doubled again. On the way up, each level is joined with what
the same level was on the way down:

    enter ───────────────────────────────── up1 ── head
        down1 ─────────────────────── up2
             down2 ───────────── up3
                  down3 ─── up4
                       down4

So what travels from block to block is a tuple: the levels that still wait to be joined, and behind
them the current one. Where none waits, at both ends, it is the current one alone.

The paper loses a border at every convolution. Here they are padded and have BatchNorm, as it is
trained today. Where a level has an odd size, the level below has half of it rounded down, and the
way up adds the missing row or column.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from farandole.errors import UserError
from farandole.models.pieces import (
    check_request,
    conv_norm_relu,
    initialise_he,
    initialise_normal,
    sequence,
)

Levels = Tensor | tuple[Tensor, ...]


def unet(
    *,
    classes: int = 2,
    image_size: int = 572,
    channels: int = 1,
    width: int = 64,
    depth: int = 4,
) -> nn.Sequential:
    """U-Net; 31,036,546 parameters with the defaults, 31,037,698 for colour images.

    `width` is the number of channels at full size; every level down has twice as many. The scores
    have the shape (samples, `classes`, height, width).
    """
    if width < 1:
        raise UserError(f"unet: width={width}; give at least 1 channel (64 by default).")
    if depth < 1:
        raise UserError(
            f"unet: depth={depth}; give at least 1 level below the image (4 by default)."
        )
    check_request(
        "unet", classes=classes, channels=channels, image_size=image_size, smallest_image=2**depth
    )
    widths = [width * 2**level for level in range(depth + 1)]
    blocks: list[tuple[str, nn.Module]] = [("enter", _two_convolutions(channels, width))]
    for level in range(1, depth + 1):
        blocks.append((f"down{level}", Down(widths[level - 1], widths[level])))
    for level in range(depth, 0, -1):
        blocks.append((f"up{level}", Up(widths[level], widths[level - 1])))
    blocks.append(("head", nn.Conv2d(width, classes, 1)))
    model = sequence(blocks)
    initialise_he(model)
    initialise_normal(model[-1], std=0.01)
    return model


class Down(nn.Module):
    """Adds a level of half the size."""

    def __init__(self, channels_in: int, channels_out: int) -> None:
        super().__init__()
        self.pool = nn.MaxPool2d(2)
        self.convolve = _two_convolutions(channels_in, channels_out)

    def forward(self, levels: Levels) -> Levels:
        above = (levels,) if isinstance(levels, Tensor) else levels
        return (*above, self.convolve(self.pool(above[-1])))


class Up(nn.Module):
    """Enlarges the current level and joins it with the one above."""

    def __init__(self, channels_in: int, channels_out: int) -> None:
        super().__init__()
        self.enlarge = nn.ConvTranspose2d(channels_in, channels_out, 2, stride=2)
        self.convolve = _two_convolutions(2 * channels_out, channels_out)

    def forward(self, levels: tuple[Tensor, ...]) -> Levels:
        *waiting, above, current = levels
        enlarged = self.enlarge(current, output_size=above.shape[2:])
        joined = self.convolve(torch.cat([above, enlarged], dim=1))
        return (*waiting, joined) if waiting else joined


def _two_convolutions(channels_in: int, channels_out: int) -> nn.Sequential:
    return sequence(
        [
            ("conv1", conv_norm_relu(channels_in, channels_out, 3)),
            ("conv2", conv_norm_relu(channels_out, channels_out, 3)),
        ]
    )
