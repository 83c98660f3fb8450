"""Models whose outputs are images: segmentation, poses, detection's pyramids."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.registry import CLASSES, PIXELS, case, conv, conv_norm_relu, numbers, several

FAMILY = "segmentation and detection"


class DoubleConv(nn.Sequential):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(conv_norm_relu(inputs, outputs), conv_norm_relu(outputs, outputs))


@case("U-Net", FAMILY, targets=PIXELS)
class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inc, self.down1, self.down2 = DoubleConv(3, 4), DoubleConv(4, 6), DoubleConv(6, 8)
        self.up1, self.conv1 = nn.ConvTranspose2d(8, 6, 2, 2), DoubleConv(12, 6)
        self.up2, self.conv2 = (
            nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True),
            DoubleConv(10, 4),
        )
        self.outc = nn.Conv2d(4, CLASSES, 1)

    def forward(self, x: Tensor) -> Tensor:
        x1 = self.inc(x)
        x2 = self.down1(F.max_pool2d(x1, 2))
        x3 = self.down2(F.max_pool2d(x2, 2))
        x = self.up1(x3)
        dy, dx = x2.size()[2] - x.size()[2], x2.size()[3] - x.size()[3]
        x = F.pad(x, [dx // 2, dx - dx // 2, dy // 2, dy - dy // 2])
        x = self.conv1(torch.cat([x2, x], dim=1))
        return self.outc(self.conv2(torch.cat([x1, self.up2(x)], dim=1)))


@case("UNet++", FAMILY, targets=PIXELS)
class NestedUNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pool, self.up = nn.MaxPool2d(2, 2), nn.Upsample(scale_factor=2, mode="nearest")
        self.conv0_0, self.conv1_0, self.conv2_0 = (
            DoubleConv(3, 3),
            DoubleConv(3, 4),
            DoubleConv(4, 5),
        )
        self.conv0_1, self.conv1_1, self.conv0_2 = (
            DoubleConv(7, 3),
            DoubleConv(9, 4),
            DoubleConv(10, 3),
        )
        self.final = nn.Conv2d(3, CLASSES, 1)

    def forward(self, x: Tensor) -> Tensor:
        x0_0 = self.conv0_0(x)
        x1_0 = self.conv1_0(self.pool(x0_0))
        x0_1 = self.conv0_1(torch.cat([x0_0, self.up(x1_0)], 1))
        x2_0 = self.conv2_0(self.pool(x1_0))
        x1_1 = self.conv1_1(torch.cat([x1_0, self.up(x2_0)], 1))
        x0_2 = self.conv0_2(torch.cat([x0_0, x0_1, self.up(x1_1)], 1))
        return self.final(x0_2)


class Backbone(nn.Module):
    """Images of 16, 8 and 4 pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.layer1, self.layer2 = conv_norm_relu(3, 4, 3), conv_norm_relu(4, 6, 3, 2)
        self.layer3 = conv_norm_relu(6, 8, 3, 2)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        c1 = self.layer1(x)
        c2 = self.layer2(c1)
        return {"c1": c1, "c2": c2, "c3": self.layer3(c2)}


@case("FCN", FAMILY, targets=PIXELS)
class Fcn(nn.Module):
    cuts = ("score3",)

    def __init__(self) -> None:
        super().__init__()
        self.backbone = Backbone()
        self.score2, self.score3 = nn.Conv2d(6, CLASSES, 1), nn.Conv2d(8, CLASSES, 1)

    def forward(self, x: Tensor) -> Tensor:
        input_shape = x.shape[-2:]
        features = self.backbone(x)
        out = F.interpolate(
            self.score3(features["c3"]), scale_factor=2.0, mode="bilinear", align_corners=False
        )
        out = out + self.score2(features["c2"])
        return F.interpolate(out, size=input_shape, mode="bilinear", align_corners=False)


class AsppPooling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(8, 3, 1), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        size = x.shape[-2:]
        return F.interpolate(self.layers(x), size=size, mode="bilinear", align_corners=False)


@case("DeepLab v3 (ASPP)", FAMILY, targets=PIXELS, draws=True)
class DeepLab(nn.Module):
    cuts = ("project",)

    def __init__(self) -> None:
        super().__init__()
        self.backbone = Backbone()
        rates = [nn.Conv2d(8, 3, 3, padding=rate, dilation=rate) for rate in (1, 2, 3)]
        self.convs = nn.ModuleList([*rates, AsppPooling()])
        self.project = nn.Sequential(
            nn.Conv2d(12, 4, 1), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.5)
        )
        self.classify = nn.Conv2d(4, CLASSES, 1)

    def forward(self, x: Tensor) -> Tensor:
        features = self.backbone(x)["c3"]
        found = [each(features) for each in self.convs]
        out = self.classify(self.project(torch.cat(found, dim=1)))
        return F.interpolate(out, size=x.shape[-2:], mode="bilinear", align_corners=False)


@case("PSPNet", FAMILY, targets=PIXELS)
class PspNet(nn.Module):
    cuts = ("final",)

    def __init__(self) -> None:
        super().__init__()
        self.backbone = Backbone()
        self.pools = nn.ModuleList(
            [nn.Sequential(nn.AdaptiveAvgPool2d(size), nn.Conv2d(8, 2, 1)) for size in (1, 2, 3)]
        )
        self.final = nn.Sequential(conv_norm_relu(14, 6), nn.Conv2d(6, CLASSES, 1))

    def forward(self, x: Tensor) -> Tensor:
        feats = self.backbone(x)["c3"]
        h, w = feats.size(2), feats.size(3)
        priors = [
            F.interpolate(pool(feats), size=(h, w), mode="bilinear") for pool in self.pools
        ] + [feats]
        return F.interpolate(self.final(torch.cat(priors, 1)), size=x.size()[2:], mode="bilinear")


def pyramid_loss(outputs: list[Tensor], targets: Tensor) -> Tensor:
    return sum(F.mse_loss(each, targets[:, :, :: 2**i, :: 2**i]) for i, each in enumerate(outputs))  # type: ignore[return-value]


@case("FPN", FAMILY, targets=numbers(4, 16, 16), loss=pyramid_loss)
class Fpn(nn.Module):
    """Returns an image for each level."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = Backbone()
        self.lateral = nn.ModuleList([nn.Conv2d(width, 4, 1) for width in (4, 6, 8)])
        self.smooth = nn.ModuleList([conv(4, 4) for _ in range(3)])

    def forward(self, x: Tensor) -> list[Tensor]:
        found = self.backbone(x)
        laterals = [
            layer(found[key]) for layer, key in zip(self.lateral, ("c1", "c2", "c3"), strict=True)
        ]
        for i in range(2, 0, -1):
            shape = laterals[i - 1].shape[2:]
            laterals[i - 1] = laterals[i - 1] + F.interpolate(
                laterals[i], size=shape, mode="nearest"
            )
        return [layer(each) for layer, each in zip(self.smooth, laterals, strict=True)]


@case("HRNet", FAMILY, targets=PIXELS)
class HighResolution(nn.Module):
    """Two branches of different sizes that exchange what they hold."""

    def __init__(self) -> None:
        super().__init__()
        self.high, self.low = conv_norm_relu(3, 4), conv_norm_relu(3, 6, 3, 2)
        self.down, self.up = conv(4, 6, 3, 2), conv(6, 4, 1)
        self.high2, self.low2 = conv_norm_relu(4, 4), conv_norm_relu(6, 6)
        self.last = nn.Conv2d(10, CLASSES, 1)

    def forward(self, x: Tensor) -> Tensor:
        high, low = self.high(x), self.low(x)
        height, width = high.size(2), high.size(3)
        raised = F.interpolate(
            self.up(low), size=(height, width), mode="bilinear", align_corners=True
        )
        high, low = F.relu(high + raised), F.relu(low + self.down(high))
        high, low = self.high2(high), self.low2(low)
        low = F.interpolate(low, size=(height, width), mode="bilinear", align_corners=True)
        return self.last(torch.cat([high, low], 1))


class Hourglass(nn.Module):
    def __init__(self, depth: int, width: int) -> None:
        super().__init__()
        self.up1, self.low1 = conv_norm_relu(width, width), conv_norm_relu(width, width)
        self.low2: nn.Module = (
            Hourglass(depth - 1, width) if depth > 1 else conv_norm_relu(width, width)
        )
        self.low3 = conv_norm_relu(width, width)

    def forward(self, x: Tensor) -> Tensor:
        low = self.low3(self.low2(self.low1(F.max_pool2d(x, 2, stride=2))))
        return self.up1(x) + F.interpolate(low, scale_factor=2)


def heatmap_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return ((outputs - targets[:, None]) ** 2).mean()


@case("stacked hourglass", FAMILY, targets=numbers(2, 16, 16), loss=heatmap_loss)
class StackedHourglass(nn.Module):
    """Predicts after each of two hourglasses; all predictions count."""

    def __init__(self) -> None:
        super().__init__()
        self.pre = conv_norm_relu(3, 4)
        self.hgs = nn.ModuleList([Hourglass(2, 4) for _ in range(2)])
        self.outs, self.back = nn.ModuleList([conv(4, 2, 1) for _ in range(2)]), conv(2, 4, 1)

    def forward(self, images: Tensor) -> Tensor:
        x, found = self.pre(images), []
        for i in range(2):
            features = self.hgs[i](x)
            found.append(self.outs[i](features))
            if i < 1:
                x = x + features + self.back(found[i])
        return torch.stack(found, 1)


def detection_loss(outputs: tuple[Tensor, Tensor], targets: tuple[Tensor, Tensor]) -> Tensor:
    scores, boxes = outputs
    return F.cross_entropy(scores.flatten(0, 1), targets[0].flatten()) + F.smooth_l1_loss(
        boxes, targets[1]
    )


@case(
    "SSD heads",
    FAMILY,
    targets=several(lambda n, g: torch.randint(CLASSES, (n, 80), generator=g), numbers(80, 4)),
    loss=detection_loss,
)
class Ssd(nn.Module):
    """Scores and boxes of all places of two levels, in one row each."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = Backbone()
        self.scores = nn.ModuleList([conv(6, CLASSES), conv(8, CLASSES)])
        self.boxes = nn.ModuleList([conv(6, 4), conv(8, 4)])

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        found = self.backbone(x)
        scores, boxes = [], []
        for i, key in enumerate(("c2", "c3")):
            n = found[key].shape[0]
            scores.append(self.scores[i](found[key]).permute(0, 2, 3, 1).reshape(n, -1, CLASSES))
            boxes.append(self.boxes[i](found[key]).permute(0, 2, 3, 1).contiguous().view(n, -1, 4))
        return torch.cat(scores, dim=1), torch.cat(boxes, dim=1)


class YoloBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.cv1, self.cv2 = (
            conv_norm_relu(width, width // 2, 1),
            conv_norm_relu(2 * width, width, 1),
        )
        self.pool = nn.MaxPool2d(5, 1, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.cv1(x)
        y1 = self.pool(x)
        y2 = self.pool(y1)
        return self.cv2(torch.cat((x, y1, y2, self.pool(y2)), 1))


@case("YOLO (SPPF, anchors)", FAMILY, targets=numbers(2, 8, 8, 6), loss=F.mse_loss)
class Yolo(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.sppf, self.detect = (
            conv_norm_relu(3, 6, 3, 2),
            YoloBlock(6),
            nn.Conv2d(6, 12, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.detect(self.sppf(self.stem(x)))
        bs, _, ny, nx = x.shape
        return x.view(bs, 2, 6, ny, nx).permute(0, 1, 3, 4, 2).contiguous().sigmoid()


@case("ESPCN (pixel shuffle)", FAMILY, targets=numbers(3, 32, 32), loss=F.l1_loss)
def espcn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 6, 5, padding=2), nn.Tanh(), conv(6, 12), nn.PixelShuffle(2), nn.Sigmoid()
    )
