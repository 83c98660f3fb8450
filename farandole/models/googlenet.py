"""GoogLeNet (Szegedy et al. 2015), with BatchNorm as it is trained today.

One inception module is one block: four branches over the same input, joined along the channels.
The two auxiliary heads are blocks of the sequence too (see `auxiliary`); they are left out unless
asked for.

The widely used weights come from a port in which the paper's 5×5 branch has a 3×3 kernel. The
default follows it, because the parameter count everybody quotes does; `wide_kernel=5` is the paper.
"""

from __future__ import annotations

from torch import nn

from farandole.errors import UserError
from farandole.models.auxiliary import AuxiliaryHead, Carry
from farandole.models.pieces import (
    Branches,
    check_request,
    conv_norm_relu,
    initialise_normal,
    pooled_head,
    sequence,
)

NORM_EPS = 1e-3

# Table 1 of the paper. A pooling halves the image before 4a and before 5a.
# name: 1×1, 3×3 reduced, 3×3, 5×5 reduced, 5×5, projection of the pooled input
MODULES = (
    ("3a", (64, 96, 128, 16, 32, 32)),
    ("3b", (128, 128, 192, 32, 96, 64)),
    ("4a", (192, 96, 208, 16, 48, 64)),
    ("4b", (160, 112, 224, 24, 64, 64)),
    ("4c", (128, 128, 256, 24, 64, 64)),
    ("4d", (112, 144, 288, 32, 64, 64)),
    ("4e", (256, 160, 320, 32, 128, 128)),
    ("5a", (256, 160, 320, 32, 128, 128)),
    ("5b", (384, 192, 384, 48, 128, 128)),
)
AUXILIARY_BEHIND = ("4a", "4d")


def googlenet(
    *,
    classes: int = 1000,
    image_size: int = 224,
    channels: int = 3,
    auxiliary: bool = False,
    wide_kernel: int = 3,
    dropout: float = 0.2,
) -> nn.Sequential:
    """GoogLeNet; 6,624,904 parameters with the defaults, 13,004,888 with the auxiliary heads.

    With `auxiliary=True` the model in training returns `(logits, auxiliary1, auxiliary2)`; wrap
    the loss in `with_auxiliary`. In evaluation it returns the logits.
    """
    check_request(
        "googlenet", classes=classes, channels=channels, image_size=image_size, smallest_image=31
    )
    if wide_kernel not in (3, 5):
        raise UserError(
            f"googlenet: wide_kernel={wide_kernel}; write 3 (the usual port) or 5 (the paper)."
        )

    blocks: list[tuple[str, nn.Module]] = [
        ("conv1", _conv(channels, 64, 7, stride=2)),
        ("pool1", _pool()),
        ("conv2_reduce", _conv(64, 64, 1)),
        ("conv2", _conv(64, 192, 3)),
        ("pool2", _pool()),
    ]
    channels_in = 192
    for name, widths in MODULES:
        if name in ("4a", "5a"):
            blocks.append((f"pool{int(name[0]) - 1}", Carry(_pool())))
        blocks.append((f"inception{name}", Carry(_inception(channels_in, widths, wide_kernel))))
        one, _, three, _, five, projection = widths
        channels_in = one + three + five + projection
        if auxiliary and name in AUXILIARY_BEHIND:
            head = AuxiliaryHead(_auxiliary(channels_in, classes))
            blocks.append((f"auxiliary{AUXILIARY_BEHIND.index(name) + 1}", head))
    blocks.append(("head", Carry(pooled_head(channels_in, classes, dropout=dropout))))

    model = sequence(blocks)
    initialise_normal(model, std=0.01)
    return model


def _conv(channels_in: int, channels_out: int, kernel: int, *, stride: int = 1) -> nn.Sequential:
    return conv_norm_relu(channels_in, channels_out, kernel, stride=stride, eps=NORM_EPS)


def _pool() -> nn.MaxPool2d:
    return nn.MaxPool2d(3, stride=2, ceil_mode=True)


def _inception(
    channels_in: int, widths: tuple[int, int, int, int, int, int], wide_kernel: int
) -> Branches:
    one, three_reduced, three, five_reduced, five, projection = widths
    return Branches(
        one=_conv(channels_in, one, 1),
        three=nn.Sequential(
            _conv(channels_in, three_reduced, 1),
            _conv(three_reduced, three, 3),
        ),
        five=nn.Sequential(
            _conv(channels_in, five_reduced, 1),
            _conv(five_reduced, five, wide_kernel),
        ),
        pool=nn.Sequential(
            nn.MaxPool2d(3, stride=1, padding=1),
            _conv(channels_in, projection, 1),
        ),
    )


def _auxiliary(channels: int, classes: int) -> nn.Sequential:
    return sequence(
        [
            ("pool", nn.AdaptiveAvgPool2d(4)),
            ("conv", _conv(channels, 128, 1)),
            ("flatten", nn.Flatten()),
            ("hidden", nn.Linear(128 * 4 * 4, 1024)),
            ("relu", nn.ReLU(inplace=True)),
            ("dropout", nn.Dropout(0.7)),
            ("linear", nn.Linear(1024, classes)),
        ]
    )
