"""Two models small enough for tests, examples and a laptop: a CNN and an MLP.

Neither has BatchNorm, so that N workers on shares of a batch compute exactly what one worker
computes on the whole of it. Both start from PyTorch's default initialisation.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from farandole.errors import UserError
from farandole.models.pieces import check_request, sequence


def small_cnn(
    *, classes: int = 10, image_size: int = 28, channels: int = 1, width: int = 16
) -> nn.Sequential:
    """Two 3×3 convolutions of `width` and 2·`width` channels, a hidden layer of 4·`width`.

    Made for 1×8×8 (digits), 1×28×28 (Fashion-MNIST) and 3×32×32 (CIFAR); any size from 4 works.
    """
    check_request(
        "small_cnn", classes=classes, channels=channels, image_size=image_size, smallest_image=4
    )
    if width < 1:
        raise UserError(f"small_cnn: width={width}; give at least 1 channel (16 by default).")
    side = image_size // 4
    return sequence(
        [
            ("conv1", _conv(channels, width)),
            ("conv2", _conv(width, 2 * width)),
            ("hidden", _hidden(2 * width * side * side, 4 * width)),
            ("classify", nn.Linear(4 * width, classes)),
        ]
    )


def mlp(
    *,
    classes: int = 10,
    image_size: int = 28,
    channels: int = 1,
    hidden: Sequence[int] = (256, 128),
) -> nn.Sequential:
    """Linear layers with ReLU between them; `hidden` lists their widths, from the input on."""
    check_request(
        "mlp", classes=classes, channels=channels, image_size=image_size, smallest_image=1
    )
    if any(width < 1 for width in hidden):
        raise UserError(f"mlp: hidden={tuple(hidden)}; every layer needs a width of at least 1.")
    widths = [channels * image_size * image_size, *hidden]
    blocks: list[tuple[str, nn.Module]] = [
        (f"hidden{index}", _hidden(widths[index - 1], widths[index]))
        for index in range(1, len(widths))
    ]
    classify = sequence([("flatten", nn.Flatten()), ("linear", nn.Linear(widths[-1], classes))])
    return sequence([*blocks, ("classify", classify)])


def _conv(channels_in: int, channels_out: int) -> nn.Sequential:
    return sequence(
        [
            ("conv", nn.Conv2d(channels_in, channels_out, 3, padding=1)),
            ("relu", nn.ReLU(inplace=True)),
            ("pool", nn.MaxPool2d(2)),
        ]
    )


def _hidden(features_in: int, features_out: int) -> nn.Sequential:
    return sequence(
        [
            ("flatten", nn.Flatten()),
            ("linear", nn.Linear(features_in, features_out)),
            ("relu", nn.ReLU(inplace=True)),
        ]
    )
