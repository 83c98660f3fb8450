"""Inception v3 (Szegedy et al. 2016).

Eleven modules of five kinds, A to E. A and C and E look at several scales at once, large kernels
taken apart into rows and columns; B and D halve the image. One module is one block. The auxiliary
head behind the last C is a block of the sequence too (see `auxiliary`), left out unless asked for.
"""

from __future__ import annotations

from torch import nn

from farandole.models.auxiliary import AuxiliaryHead, Carry
from farandole.models.pieces import (
    Branches,
    Side,
    check_request,
    conv_norm_relu,
    initialise_normal,
    pooled_head,
    sequence,
)

NORM_EPS = 1e-3
ROW7, COLUMN7 = (1, 7), (7, 1)
ROW3, COLUMN3 = (1, 3), (3, 1)


def inception_v3(
    *,
    classes: int = 1000,
    image_size: int = 299,
    channels: int = 3,
    auxiliary: bool = False,
    dropout: float = 0.5,
) -> nn.Sequential:
    """Inception v3; 23,834,568 parameters with the defaults, 27,161,264 with the auxiliary head.

    With `auxiliary=True` the model in training returns `(logits, auxiliary)`; wrap the loss in
    `with_auxiliary`. In evaluation it returns the logits. The auxiliary head has a fixed grid and
    needs images of at least 299 pixels a side, the rest of the model 75.
    """
    check_request(
        "inception_v3 with its auxiliary head" if auxiliary else "inception_v3",
        classes=classes,
        channels=channels,
        image_size=image_size,
        smallest_image=299 if auxiliary else 75,
    )
    blocks: list[tuple[str, nn.Module]] = [
        ("conv1", _conv(channels, 32, 3, stride=2, padding=0)),
        ("conv2", _conv(32, 32, 3, padding=0)),
        ("conv3", _conv(32, 64, 3)),
        ("pool1", nn.MaxPool2d(3, stride=2)),
        ("conv4", _conv(64, 80, 1)),
        ("conv5", _conv(80, 192, 3, padding=0)),
        ("pool2", nn.MaxPool2d(3, stride=2)),
        ("mixed_a1", _module_a(192, projection=32)),
        ("mixed_a2", _module_a(256, projection=64)),
        ("mixed_a3", _module_a(288, projection=64)),
        ("mixed_b", _module_b(288)),
        ("mixed_c1", _module_c(width=128)),
        ("mixed_c2", _module_c(width=160)),
        ("mixed_c3", _module_c(width=160)),
        ("mixed_c4", _module_c(width=192)),
        ("mixed_d", Carry(_module_d(768))),
        ("mixed_e1", Carry(_module_e(1280))),
        ("mixed_e2", Carry(_module_e(2048))),
        ("head", Carry(pooled_head(2048, classes, dropout=dropout))),
    ]
    for _name, block in blocks:
        initialise_normal(block, std=0.1)
    if auxiliary:
        head = _auxiliary(768, classes)
        initialise_normal(head, std=0.01)
        initialise_normal(head[-1], std=0.001)
        behind = [name for name, _block in blocks].index("mixed_c4") + 1
        blocks.insert(behind, ("auxiliary", AuxiliaryHead(head)))
    return sequence(blocks)


def _conv(
    channels_in: int,
    channels_out: int,
    kernel: Side,
    *,
    stride: int = 1,
    padding: int | None = None,
) -> nn.Sequential:
    return conv_norm_relu(
        channels_in, channels_out, kernel, stride=stride, padding=padding, eps=NORM_EPS
    )


def _projected_mean(channels_in: int, channels_out: int) -> nn.Sequential:
    return nn.Sequential(
        nn.AvgPool2d(3, stride=1, padding=1),
        _conv(channels_in, channels_out, 1),
    )


def _module_a(channels_in: int, *, projection: int) -> Branches:
    """The classical module, its 5×5 beside two 3×3 in a row; 224 + `projection` channels."""
    return Branches(
        one=_conv(channels_in, 64, 1),
        five=nn.Sequential(_conv(channels_in, 48, 1), _conv(48, 64, 5)),
        three_twice=nn.Sequential(_conv(channels_in, 64, 1), _conv(64, 96, 3), _conv(96, 96, 3)),
        pool=_projected_mean(channels_in, projection),
    )


def _module_b(channels_in: int) -> Branches:
    """Halves the image; 480 more channels than it receives."""
    return Branches(
        three=_conv(channels_in, 384, 3, stride=2, padding=0),
        three_twice=nn.Sequential(
            _conv(channels_in, 64, 1),
            _conv(64, 96, 3),
            _conv(96, 96, 3, stride=2, padding=0),
        ),
        pool=nn.MaxPool2d(3, stride=2),
    )


def _module_c(*, width: int) -> Branches:
    """7×7 kernels as rows and columns; 768 channels in and out."""
    return Branches(
        one=_conv(768, 192, 1),
        seven=nn.Sequential(
            _conv(768, width, 1),
            _conv(width, width, ROW7),
            _conv(width, 192, COLUMN7),
        ),
        seven_twice=nn.Sequential(
            _conv(768, width, 1),
            _conv(width, width, COLUMN7),
            _conv(width, width, ROW7),
            _conv(width, width, COLUMN7),
            _conv(width, 192, ROW7),
        ),
        pool=_projected_mean(768, 192),
    )


def _module_d(channels_in: int) -> Branches:
    """Halves the image; 512 more channels than it receives."""
    return Branches(
        three=nn.Sequential(
            _conv(channels_in, 192, 1),
            _conv(192, 320, 3, stride=2, padding=0),
        ),
        seven=nn.Sequential(
            _conv(channels_in, 192, 1),
            _conv(192, 192, ROW7),
            _conv(192, 192, COLUMN7),
            _conv(192, 192, 3, stride=2, padding=0),
        ),
        pool=nn.MaxPool2d(3, stride=2),
    )


def _module_e(channels_in: int) -> Branches:
    """The widest: 3×3 kernels as a row beside a column; 2048 channels."""
    return Branches(
        one=_conv(channels_in, 320, 1),
        three=nn.Sequential(_conv(channels_in, 384, 1), _row_beside_column()),
        three_twice=nn.Sequential(
            _conv(channels_in, 448, 1),
            _conv(448, 384, 3),
            _row_beside_column(),
        ),
        pool=_projected_mean(channels_in, 192),
    )


def _row_beside_column() -> Branches:
    return Branches(row=_conv(384, 384, ROW3), column=_conv(384, 384, COLUMN3))


def _auxiliary(channels: int, classes: int) -> nn.Sequential:
    return sequence(
        [
            ("pool", nn.AvgPool2d(5, stride=3)),
            ("reduce", _conv(channels, 128, 1)),
            ("conv", _conv(128, 768, 5, padding=0)),
            ("mean", nn.AdaptiveAvgPool2d(1)),
            ("flatten", nn.Flatten()),
            ("linear", nn.Linear(768, classes)),
        ]
    )
