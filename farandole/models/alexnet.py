"""AlexNet twice: the one-device network everybody runs, and the two-tower one of 2012.

In 2012 the network did not fit on one GPU. Krizhevsky, Sutskever and Hinton split the channels in
two towers, one a device, which see each other only where drawn with a cross:

    image ─┬─ conv1 ── conv2 ─╳─ conv3 ── conv4 ── conv5 ─╳─ fc6 ─╳─ fc7 ─╳─ fc8
           └─ conv1 ── conv2 ─╳─ conv3 ── conv4 ── conv5 ─╳─ fc6 ─╳─ fc7 ─╯

`alexnet_towers` keeps that structure in one tensor: the first half of the channels is the first
tower, and a layer without exchange is a convolution in two groups. `alexnet` is the single-tower
variant of Krizhevsky 2014 with torchvision's shapes, and starts from PyTorch's defaults as it does
there.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from farandole.models.pieces import check_request, initialise_normal, sequence, side_after

TOWERS = 2


def alexnet(
    *, classes: int = 1000, image_size: int = 224, channels: int = 3, dropout: float = 0.5
) -> nn.Sequential:
    """AlexNet for one device; 61,100,840 parameters with the defaults.

    The first linear layer sees a grid of 6×6, or less where the image gives less.
    """
    check_request(
        "alexnet", classes=classes, channels=channels, image_size=image_size, smallest_image=63
    )
    side = side_after(image_size, kernel=11, stride=4, padding=2)
    for _pool in range(3):
        side = side_after(side, kernel=3, stride=2)
    side = min(6, side)

    return sequence(
        [
            ("conv1", _conv(channels, 64, 11, stride=4, padding=2, pool=True)),
            ("conv2", _conv(64, 192, 5, padding=2, pool=True)),
            ("conv3", _conv(192, 384, 3, padding=1)),
            ("conv4", _conv(384, 256, 3, padding=1)),
            ("conv5", _conv(256, 256, 3, padding=1, pool=True)),
            ("pool5", nn.AdaptiveAvgPool2d(side)),
            ("fc6", _linear(256 * side * side, 4096, dropout=dropout)),
            ("fc7", _linear(4096, 4096, dropout=dropout)),
            ("fc8", nn.Linear(4096, classes)),
        ]
    )


def alexnet_towers(
    *, classes: int = 1000, image_size: int = 227, channels: int = 3, dropout: float = 0.5
) -> nn.Sequential:
    """The two-tower AlexNet of 2012; 60,965,224 parameters with the defaults."""
    check_request(
        "alexnet_towers",
        classes=classes,
        channels=channels,
        image_size=image_size,
        smallest_image=67,
    )
    side = side_after(image_size, kernel=11, stride=4)
    for _pool in range(3):
        side = side_after(side, kernel=3, stride=2)

    # conv1 has no groups: both towers see every colour of the image.
    model = sequence(
        [
            ("conv1", _conv(channels, 96, 11, stride=4, normalise=True, pool=True)),
            ("conv2", _conv(96, 256, 5, padding=2, groups=TOWERS, normalise=True, pool=True)),
            ("conv3", _conv(256, 384, 3, padding=1)),
            ("conv4", _conv(384, 384, 3, padding=1, groups=TOWERS)),
            ("conv5", _conv(384, 256, 3, padding=1, groups=TOWERS, pool=True)),
            ("fc6", _linear(256 * side * side, 4096, dropout=dropout)),
            ("fc7", _linear(4096, 4096, dropout=dropout)),
            ("fc8", nn.Linear(4096, classes)),
        ]
    )
    # Section 5 of the paper: biases of 1 give the ReLUs of these layers positive inputs at first.
    initialise_normal(model, std=0.01)
    for layer in ("conv2.conv", "conv4.conv", "conv5.conv", "fc6.linear", "fc7.linear"):
        nn.init.ones_(model.get_parameter(f"{layer}.bias"))
    return model


class TowerResponseNorm(nn.Module):
    """The paper's local response normalisation, within each tower.

    It sums over 5 neighbouring channels. Over the whole tensor the channels at the seam would see
    the other tower, which in the paper lived on another device.
    """

    # The paper's alpha of 1e-4 multiplies a sum, `avg_pool3d` gives a mean over the 5 channels.
    K, ALPHA, BETA = 2.0, 5 * 1e-4, 0.75

    def forward(self, x: Tensor) -> Tensor:
        batch, channels, height, width = x.shape
        # The towers get an axis of their own, which tiles can divide between two devices.
        towers = x.reshape(batch, TOWERS, channels // TOWERS, height, width)
        near = F.avg_pool3d(towers.square(), (5, 1, 1), stride=1, padding=(2, 0, 0))
        normalised = towers / (self.K + self.ALPHA * near) ** self.BETA
        return normalised.reshape(batch, channels, height, width)


def _conv(
    channels_in: int,
    channels_out: int,
    kernel: int,
    *,
    stride: int = 1,
    padding: int = 0,
    groups: int = 1,
    normalise: bool = False,
    pool: bool = False,
) -> nn.Sequential:
    return sequence(
        [
            ("conv", nn.Conv2d(channels_in, channels_out, kernel, stride, padding, groups=groups)),
            ("relu", nn.ReLU(inplace=True)),
            *([("norm", TowerResponseNorm())] if normalise else []),
            *([("pool", nn.MaxPool2d(3, stride=2))] if pool else []),
        ]
    )


def _linear(features_in: int, features_out: int, *, dropout: float) -> nn.Sequential:
    return sequence(
        [
            ("flatten", nn.Flatten()),
            ("dropout", nn.Dropout(dropout)),
            ("linear", nn.Linear(features_in, features_out)),
            ("relu", nn.ReLU(inplace=True)),
        ]
    )
