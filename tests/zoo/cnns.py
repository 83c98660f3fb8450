"""Classifiers made of convolutions."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.registry import CLASSES, case, conv, conv_norm_relu

FAMILY = "convolutional classifiers"


@case("AlexNet", FAMILY, draws=True)
class AlexNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 6, 5, 2, 2),
            nn.ReLU(inplace=True),
            nn.LocalResponseNorm(3),
            nn.MaxPool2d(3, 2, 1),
            conv(6, 6, groups=2),
            nn.ReLU(inplace=True),
            conv(6, 6),
            nn.ReLU(inplace=True),
        )
        self.avgpool = nn.AdaptiveAvgPool2d((3, 3))
        self.classifier = nn.Sequential(
            nn.Dropout(), nn.Linear(54, 8), nn.ReLU(inplace=True), nn.Linear(8, CLASSES)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.avgpool(self.features(x))
        return self.classifier(torch.flatten(x, 1))


@case("VGG", FAMILY)
def vgg() -> nn.Module:
    layers: list[nn.Module] = []
    channels = 3
    for width in (4, 6):
        layers += [conv_norm_relu(channels, width), conv_norm_relu(width, width), nn.MaxPool2d(2)]
        channels = width
    return nn.Sequential(
        *layers, nn.Flatten(), nn.Linear(96, 8), nn.ReLU(True), nn.Linear(8, CLASSES)
    )


class BasicBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1, self.bn1 = conv(inputs, outputs, 3, stride, bias=False), nn.BatchNorm2d(outputs)
        self.conv2, self.bn2 = conv(outputs, outputs, bias=False), nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.downsample: nn.Module | None = None
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(
                conv(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        identity = x
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        return self.relu(out)


class Bottleneck(nn.Module):
    """As ResNeXt with groups, as Wide ResNet with a wide middle."""

    def __init__(
        self, inputs: int, middle: int, outputs: int, stride: int = 1, groups: int = 1
    ) -> None:
        super().__init__()
        self.body = nn.Sequential(
            conv_norm_relu(inputs, middle, 1),
            conv_norm_relu(middle, middle, 3, stride, groups=groups),
            conv(middle, outputs, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.shortcut = (
            nn.Identity() if inputs == outputs and stride == 1 else conv(inputs, outputs, 1, stride)
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.shortcut(x))


class Classifier(nn.Module):
    """Layers by name, a mean over the image, a linear layer."""

    def __init__(self, width: int, *layers: nn.Module) -> None:
        super().__init__()
        self.conv1 = conv_norm_relu(3, 4)
        self.layers = nn.Sequential(*layers)
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.avgpool(self.layers(self.conv1(x)))
        x = x.view(x.size(0), -1)
        return self.fc(x)


@case("ResNet", FAMILY)
def resnet() -> nn.Module:
    return Classifier(8, BasicBlock(4, 4), BasicBlock(4, 8, 2))


@case("ResNet (bottleneck)", FAMILY)
def bottleneck_resnet() -> nn.Module:
    return Classifier(8, Bottleneck(4, 3, 8, 2), Bottleneck(8, 3, 8))


@case("ResNeXt", FAMILY)
def resnext() -> nn.Module:
    return Classifier(8, Bottleneck(4, 4, 8, 2, groups=2), Bottleneck(8, 4, 8, groups=4))


@case("Wide ResNet", FAMILY)
def wide_resnet() -> nn.Module:
    return Classifier(8, Bottleneck(4, 10, 8), Bottleneck(8, 10, 8, 2))


@case("ResNet (pre-activation)", FAMILY)
class PreActResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = conv(3, 4)
        self.norms = nn.ModuleList([nn.BatchNorm2d(4), nn.BatchNorm2d(4), nn.BatchNorm2d(8)])
        self.convs = nn.ModuleList([conv(4, 4), conv(4, 8, 3, 2), conv(8, 8)])
        self.shortcut = conv(4, 8, 1, 2)
        self.linear = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = x + self.convs[0](F.relu(self.norms[0](x)))
        out = F.relu(self.norms[1](x))
        shortcut = self.shortcut(out)
        out = self.convs[2](F.relu(self.norms[2](self.convs[1](out))))
        out += shortcut
        return self.linear(out.mean(dim=[2, 3]))


class SqueezeExcite(nn.Module):
    def __init__(self, width: int, hard: bool = False) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(width, 2), nn.Linear(2, width)
        self.gate = nn.Hardsigmoid() if hard else nn.Sigmoid()

    def forward(self, x: Tensor) -> Tensor:
        b, c, _, _ = x.size()
        y = F.adaptive_avg_pool2d(x, 1).view(b, c)
        y = self.gate(self.fc2(F.relu(self.fc1(y)))).view(b, c, 1, 1)
        return x * y.expand_as(x)


@case("SE-ResNet", FAMILY)
def se_resnet() -> nn.Module:
    return Classifier(8, BasicBlock(4, 8, 2), SqueezeExcite(8), BasicBlock(8, 8))


class Cbam(nn.Module):
    """Attention over channels, then over places."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Flatten(), nn.Linear(width, 2), nn.ReLU(), nn.Linear(2, width))
        self.spatial = nn.Conv2d(2, 1, 5, padding=2)

    def forward(self, x: Tensor) -> Tensor:
        size = (x.size(2), x.size(3))
        mean, largest = F.avg_pool2d(x, size), F.max_pool2d(x, size)
        x = x * torch.sigmoid(self.mlp(mean) + self.mlp(largest)).unsqueeze(2).unsqueeze(3)
        places = torch.cat((torch.max(x, 1)[0].unsqueeze(1), torch.mean(x, 1).unsqueeze(1)), dim=1)
        return x * torch.sigmoid(self.spatial(places))


@case("CBAM", FAMILY)
def cbam() -> nn.Module:
    return Classifier(8, BasicBlock(4, 8, 2), Cbam(8))


@case("DenseNet", FAMILY)
class DenseNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = conv(3, 4)
        self.first = nn.ModuleList(
            [
                nn.Sequential(nn.BatchNorm2d(4 + 3 * i), nn.ReLU(), conv(4 + 3 * i, 3))
                for i in range(3)
            ]
        )
        self.transition = nn.Sequential(
            nn.BatchNorm2d(13), nn.ReLU(), conv(13, 6, 1), nn.AvgPool2d(2, 2)
        )
        self.second = nn.ModuleList(
            [
                nn.Sequential(nn.BatchNorm2d(6 + 3 * i), nn.ReLU(), conv(6 + 3 * i, 3))
                for i in range(2)
            ]
        )
        self.norm5 = nn.BatchNorm2d(12)
        self.classifier = nn.Linear(12, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for blocks in (self.first, self.second):
            features = [x]
            for block in blocks:
                features.append(block(torch.cat(features, 1)))
            x = torch.cat(features, 1)
            if blocks is self.first:
                x = self.transition(x)
        out = F.relu(self.norm5(x), inplace=True)
        out = F.adaptive_avg_pool2d(out, (1, 1))
        return self.classifier(torch.flatten(out, 1))


class InceptionBlock(nn.Module):
    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.branch1 = conv_norm_relu(inputs, 3, 1)
        self.branch2 = nn.Sequential(
            conv_norm_relu(inputs, 3, 1),
            nn.Conv2d(3, 3, (1, 5), padding=(0, 2)),
            nn.Conv2d(3, 3, (5, 1), padding=(2, 0)),
        )
        self.branch3 = nn.Sequential(
            nn.MaxPool2d(3, 1, 1, ceil_mode=True), conv_norm_relu(inputs, 2, 1)
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.branch1(x), self.branch2(x), self.branch3(x)], 1)


@case("Inception", FAMILY)
def inception() -> nn.Module:
    return Classifier(8, InceptionBlock(4), nn.MaxPool2d(3, 2, ceil_mode=True), InceptionBlock(8))


class SeparableBlock(nn.Module):
    """Of Xception: depthwise, then pointwise, twice, and a strided shortcut."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.rep = nn.Sequential(
            nn.ReLU(),
            conv(inputs, inputs, groups=inputs),
            conv(inputs, outputs, 1),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            conv(outputs, outputs, groups=outputs),
            conv(outputs, outputs, 1),
            nn.BatchNorm2d(outputs),
            nn.MaxPool2d(3, 2, 1),
        )
        self.skip = conv(inputs, outputs, 1, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.rep(x) + self.skip(x)


@case("Xception", FAMILY)
def xception() -> nn.Module:
    return Classifier(8, SeparableBlock(4, 6), SeparableBlock(6, 8))


@case("MobileNet v1", FAMILY)
def mobilenet_v1() -> nn.Module:
    layers = [conv_norm_relu(4, 4, 3, 2, groups=4), conv_norm_relu(4, 8, 1)]
    return Classifier(8, *layers, conv_norm_relu(8, 8, groups=8), conv_norm_relu(8, 8, 1))


class InvertedResidual(nn.Module):
    """Of MobileNet v2; with squeeze and excitation and another activation, of v3."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        stride: int = 1,
        act: type[nn.Module] = nn.ReLU6,
        squeeze: bool = False,
    ) -> None:
        super().__init__()
        hidden = 2 * inputs
        self.use_res_connect = stride == 1 and inputs == outputs
        self.conv = nn.Sequential(
            conv(inputs, hidden, 1, bias=False),
            nn.BatchNorm2d(hidden),
            act(),
            conv(hidden, hidden, 3, stride, groups=hidden, bias=False),
            nn.BatchNorm2d(hidden),
            SqueezeExcite(hidden, hard=True) if squeeze else nn.Identity(),
            act(),
            conv(hidden, outputs, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv(x) if self.use_res_connect else self.conv(x)


@case("MobileNet v2", FAMILY)
def mobilenet_v2() -> nn.Module:
    return Classifier(6, InvertedResidual(4, 6, 2), InvertedResidual(6, 6))


@case("MobileNet v3", FAMILY)
def mobilenet_v3() -> nn.Module:
    first = InvertedResidual(4, 6, 2, nn.Hardswish, squeeze=True)
    return Classifier(6, first, InvertedResidual(6, 6, 1, nn.Hardswish, squeeze=True))


def channel_shuffle(x: Tensor, groups: int) -> Tensor:
    b, c, h, w = x.size()
    x = x.view(b, groups, c // groups, h, w)
    return torch.transpose(x, 1, 2).contiguous().view(b, c, h, w)


class ShuffleUnit(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        half = width // 2
        self.branch = nn.Sequential(
            conv_norm_relu(half, half, 1),
            conv(half, half, groups=half),
            conv_norm_relu(half, half, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        x1, x2 = x.chunk(2, dim=1)
        return channel_shuffle(torch.cat((x1, self.branch(x2)), dim=1), 2)


@case("ShuffleNet v2", FAMILY)
def shufflenet() -> nn.Module:
    return Classifier(8, conv_norm_relu(4, 8, 3, 2), ShuffleUnit(8), ShuffleUnit(8))


class GhostModule(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.outputs = outputs
        half = (outputs + 1) // 2
        self.primary = conv_norm_relu(inputs, half, 1)
        self.cheap = conv_norm_relu(half, half, 3, groups=half)

    def forward(self, x: Tensor) -> Tensor:
        x1 = self.primary(x)
        out = torch.cat([x1, self.cheap(x1)], dim=1)
        return out[:, : self.outputs, :, :]


@case("GhostNet", FAMILY)
def ghostnet() -> nn.Module:
    return Classifier(7, GhostModule(4, 7), GhostModule(7, 7))


class DropPath(nn.Module):
    """Stochastic depth: a sample skips the branch by chance."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        if self.p == 0.0 or not self.training:
            return x
        keep = 1 - self.p
        shape = (x.shape[0],) + (1,) * (x.ndim - 1)
        mask = x.new_empty(shape).bernoulli_(keep)
        return x.div(keep) * mask


class MbConv(nn.Module):
    def __init__(self, width: int, drop: float) -> None:
        super().__init__()
        self.block = nn.Sequential(
            conv(width, 2 * width, 1),
            nn.BatchNorm2d(2 * width),
            nn.SiLU(),
            conv(2 * width, 2 * width, 5, groups=2 * width),
            nn.BatchNorm2d(2 * width),
            nn.SiLU(),
            SqueezeExcite(2 * width),
            conv(2 * width, width, 1),
            nn.BatchNorm2d(width),
        )
        self.drop_path = DropPath(drop)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop_path(self.block(x))


@case("EfficientNet (stochastic depth)", FAMILY, draws=True)
def efficientnet() -> nn.Module:
    return Classifier(4, MbConv(4, 0.1), nn.AvgPool2d(2), MbConv(4, 0.2))


class ConvNextBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.dwconv = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.pwconv1, self.pwconv2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.gamma = nn.Parameter(0.5 * torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x
        x = self.dwconv(x).permute(0, 2, 3, 1)
        x = self.gamma * self.pwconv2(F.gelu(self.pwconv1(self.norm(x))))
        return shortcut + x.permute(0, 3, 1, 2)


class ChannelsFirstNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        u = x.mean(1, keepdim=True)
        s = (x - u).pow(2).mean(1, keepdim=True)
        x = (x - u) / torch.sqrt(s + 1e-6)
        return self.weight[:, None, None] * x + self.bias[:, None, None]


@case("ConvNeXt", FAMILY)
class ConvNext(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 2, 2), ChannelsFirstNorm(4))
        self.stages = nn.Sequential(
            ConvNextBlock(4), ChannelsFirstNorm(4), nn.Conv2d(4, 6, 2, 2), ConvNextBlock(6)
        )
        self.norm, self.head = nn.LayerNorm(6, eps=1e-6), nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stages(self.stem(x))
        return self.head(self.norm(x.mean([-2, -1])))


@case("RegNet", FAMILY)
def regnet() -> nn.Module:
    return Classifier(
        8, Bottleneck(4, 4, 4, 2, groups=2), SqueezeExcite(4), Bottleneck(4, 8, 8, groups=4)
    )


class Fire(nn.Module):
    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.squeeze, self.expand1x1, self.expand3x3 = conv(inputs, 2, 1), conv(2, 3, 1), conv(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.squeeze(x))
        return torch.cat([F.relu(self.expand1x1(x)), F.relu(self.expand3x3(x))], 1)


@case("SqueezeNet", FAMILY, draws=True)
def squeezenet() -> nn.Module:
    classify = [
        nn.Dropout(0.5),
        conv(6, CLASSES, 1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
    ]
    return nn.Sequential(
        conv(3, 4), nn.ReLU(), nn.MaxPool2d(3, 2, ceil_mode=True), Fire(4), Fire(6), *classify
    )


class StandardConv(nn.Conv2d):
    """Weight standardisation, through the function for batches."""

    def forward(self, x: Tensor) -> Tensor:
        weight = F.batch_norm(
            self.weight.reshape(1, self.out_channels, -1), None, None, training=True, eps=1e-5
        )
        return F.conv2d(x, weight.reshape_as(self.weight), self.bias, self.stride, self.padding)


class StandardConvByHand(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        v, m = torch.var_mean(self.weight, dim=[1, 2, 3], keepdim=True, unbiased=False)
        return F.conv2d(
            x, (self.weight - m) / torch.sqrt(v + 1e-10), self.bias, self.stride, self.padding
        )


class GroupNormBlock(nn.Module):
    def __init__(self, make: type[nn.Conv2d]) -> None:
        super().__init__()
        self.gn1, self.gn2 = nn.GroupNorm(2, 4), nn.GroupNorm(2, 4)
        self.conv1, self.conv2 = make(4, 4, 3, padding=1), make(4, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        out = self.conv1(F.relu(self.gn1(x)))
        return x + self.conv2(F.relu(self.gn2(out)))


@case("BiT (weight standardisation)", FAMILY)
def bit() -> nn.Module:
    return Classifier(
        4, GroupNormBlock(StandardConvByHand), nn.MaxPool2d(2), GroupNormBlock(StandardConvByHand)
    )


@case("NF-ResNet (weights through batch_norm)", FAMILY)
def nf_resnet() -> nn.Module:
    return Classifier(
        4, GroupNormBlock(StandardConv), nn.MaxPool2d(2), GroupNormBlock(StandardConv)
    )
