"""VGG-16: thirteen 3×3 convolutions and three linear layers, one block each.

The pooling behind the last convolution of a group belongs to that block, so that the sixteen
blocks are the sixteen layers of the name. Most of its parameters sit in one linear layer: the
classical hard case for data parallelism.
"""

from __future__ import annotations

from torch import nn

from farandole.models.pieces import check_request, initialise_he, sequence

# (channels, convolutions) of each group: configuration D of Simonyan and Zisserman 2015.
GROUPS = ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3))


def vgg16(
    *,
    classes: int = 1000,
    image_size: int = 224,
    channels: int = 3,
    dropout: float = 0.5,
    batch_norm: bool = False,
) -> nn.Sequential:
    """VGG-16; 138,357,544 parameters with the defaults, 138,365,992 with `batch_norm`.

    The first linear layer sees a grid of 7×7, or less where the image gives less (1×1 at 32×32).
    """
    check_request(
        "vgg16", classes=classes, channels=channels, image_size=image_size, smallest_image=32
    )
    side = min(7, image_size // 2 ** len(GROUPS))

    blocks: list[tuple[str, nn.Module]] = []
    for group, (width, convolutions) in enumerate(GROUPS, start=1):
        for index in range(1, convolutions + 1):
            last = index == convolutions
            blocks.append(
                (f"conv{group}_{index}", _conv(channels, width, norm=batch_norm, pool=last))
            )
            channels = width
    blocks += [
        (
            "fc6",
            sequence(
                [
                    ("pool", nn.AdaptiveAvgPool2d(side)),
                    ("flatten", nn.Flatten()),
                    *_linear(channels * side * side, 4096, dropout=dropout),
                ]
            ),
        ),
        ("fc7", sequence(_linear(4096, 4096, dropout=dropout))),
        ("fc8", nn.Linear(4096, classes)),
    ]
    model = sequence(blocks)
    initialise_he(model)
    return model


def _conv(channels_in: int, channels_out: int, *, norm: bool, pool: bool) -> nn.Sequential:
    return sequence(
        [
            ("conv", nn.Conv2d(channels_in, channels_out, 3, padding=1)),
            *([("norm", nn.BatchNorm2d(channels_out))] if norm else []),
            ("relu", nn.ReLU(inplace=True)),
            *([("pool", nn.MaxPool2d(2, stride=2))] if pool else []),
        ]
    )


def _linear(features_in: int, features_out: int, *, dropout: float) -> list[tuple[str, nn.Module]]:
    return [
        ("linear", nn.Linear(features_in, features_out)),
        ("relu", nn.ReLU(inplace=True)),
        ("dropout", nn.Dropout(dropout)),
    ]
