"""Models whose forward does something unusual: state, hooks, checkpoints, experts, constants."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.zoo.registry import CLASSES, IMAGES, case, conv, conv_norm_relu

FAMILY = "unusual forwards"


@case("spatial transformer", FAMILY)
class SpatialTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.localize = nn.Sequential(conv(3, 4, 5, 2), nn.ReLU(), nn.MaxPool2d(2))
        self.theta, self.conv, self.fc = (
            nn.Linear(64, 6),
            conv_norm_relu(3, 4),
            nn.Linear(4, CLASSES),
        )

    def forward(self, x: Tensor) -> Tensor:
        theta = self.theta(self.localize(x).view(-1, 64)).view(-1, 2, 3)
        grid = F.affine_grid(theta, x.size(), align_corners=False)
        x = F.grid_sample(x, grid, align_corners=False)
        return self.fc(self.conv(x).mean([2, 3]))


class Expert(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4))


@case("mixture of experts (dense)", FAMILY)
class DenseExperts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.gate = conv_norm_relu(3, 4, 3, 2), nn.Linear(4, 3)
        self.experts, self.head = nn.ModuleList([Expert() for _ in range(3)]), nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).mean((2, 3))
        weights = F.softmax(self.gate(x), dim=1)
        stacked = torch.stack([expert(x) for expert in self.experts], dim=1)
        return self.head(torch.einsum("be,bec->bc", weights, stacked))


@case("mixture of experts (some unused)", FAMILY)
class SparseExperts(nn.Module):
    """An expert that no sample chose has no gradient in that step."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.gate = conv_norm_relu(3, 4, 3, 2), nn.Linear(4, 5)
        self.experts, self.head = nn.ModuleList([Expert() for _ in range(5)]), nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).mean((2, 3))
        scores, chosen = F.softmax(self.gate(x), dim=1).max(dim=1)
        found = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            rows = torch.where(chosen == index)[0]
            if rows.numel():
                found = found.index_add(0, rows, expert(x[rows]) * scores[rows, None])
        return self.head(found)


def auxiliary_loss(outputs: tuple[Tensor, Tensor], targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs[0], targets) + 0.4 * F.cross_entropy(outputs[1], targets)


@case("auxiliary head (a tuple)", FAMILY, loss=auxiliary_loss)
class Auxiliary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer1, self.layer2, self.layer3 = (
            conv_norm_relu(3, 4),
            conv_norm_relu(4, 4, 3, 2),
            conv_norm_relu(4, 6),
        )
        self.aux, self.fc = (
            nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, CLASSES)),
            nn.Linear(6, CLASSES),
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.layer2(self.layer1(x))
        aux = self.aux(x)
        x = self.layer3(x)
        return self.fc(torch.flatten(F.adaptive_avg_pool2d(x, 1), 1)), aux


def with_scalar(outputs: tuple[Tensor, Tensor], targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs[0], targets) + 0.01 * outputs[1]


@case("auxiliary loss (a number)", FAMILY, loss=with_scalar)
class AuxiliaryNumber(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.body, self.fc = conv_norm_relu(3, 4), conv(4, 4), nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.stem(x)
        penalty = x.abs().mean()
        return self.fc(F.relu(self.body(x)).mean((2, 3))), penalty


@case("tied weights", FAMILY, targets=IMAGES, loss=F.mse_loss)
class TiedAutoencoder(nn.Module):
    """The decoder's weights are the encoder's."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.middle = nn.Conv2d(3, 4, 3, padding=1), conv(4, 4)
        self.bias = nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.middle(F.relu(self.encoder(x))))
        return F.conv_transpose2d(h, self.encoder.weight, self.bias, padding=1)


@case("one layer used three times", FAMILY)
class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.shared, self.fc = conv(3, 4), conv(4, 4), nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = first = torch.tanh(self.stem(x))
        for _ in range(3):
            x = torch.tanh(self.shared(x) + first)
        return self.fc(x.mean(dim=(-2, -1)))


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.stem = conv_norm_relu(3, 4, 3, 2)
        self.block1, self.block2 = (
            nn.Sequential(conv(4, 4), nn.GroupNorm(2, 4), nn.ReLU()),
            nn.Sequential(conv(4, 4), nn.Tanh()),
        )
        self.fc = nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in (self.block1, self.block2):
            x = x + checkpoint(block, x, use_reentrant=self.reentrant)
        return self.fc(x.mean((2, 3)))


@case("checkpoint (reentrant)", FAMILY)
def reentrant() -> nn.Module:
    return Checkpointed(True)


@case("checkpoint (not reentrant)", FAMILY)
def not_reentrant() -> nn.Module:
    return Checkpointed(False)


class Averaging(nn.Module):
    """A moving average of what it saw, in a buffer that forward changes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(width))
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.average.mul_(0.9).add_(x.detach().mean((0, 2, 3)), alpha=0.1)
            self.seen += 1
        return x - self.average.view(1, -1, 1, 1)


@case("moving average in a buffer", FAMILY, changes=True)
def averaging() -> nn.Module:
    last = [conv(4, 4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, CLASSES)]
    return nn.Sequential(conv(3, 4), nn.ReLU(), Averaging(4), *last)


@case("moving average in the model's own forward", FAMILY, changes=True)
class OwnAverage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.body, self.fc = conv(3, 4), conv(4, 4), nn.Linear(4, CLASSES)
        self.register_buffer("average", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        if self.training:
            self.average.mul_(0.9).add_(x.detach().mean((0, 2, 3)))
        x = x - self.average[None, :, None, None]
        return self.fc(F.relu(self.body(x)).mean((2, 3)))


@case("temperature that changes", FAMILY, changes=True)
class Annealed(nn.Module):
    """A Python attribute, other in every step."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.body, self.fc = conv(3, 4), conv(4, 4), nn.Linear(4, CLASSES)
        self.temperature = 2.0

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.stem(x) / self.temperature)
        if self.training:
            self.temperature *= 0.8
        return self.fc(F.relu(self.body(x)).mean((2, 3)))


@case("hook on a gradient", FAMILY)
class Hooked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.body, self.fc = conv(3, 4), conv(4, 4), nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        if x.requires_grad:
            x.register_hook(lambda gradient: gradient * 0.5)
        return self.fc(F.relu(self.body(x)).mean((2, 3)))


@case("global response (norm of the image)", FAMILY)
class GlobalResponse(nn.Module):
    """ConvNeXt v2's normalisation, and numbers over the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.body, self.fc = conv(3, 4), conv(4, 4), nn.Linear(4, CLASSES)
        self.gamma = nn.Parameter(torch.full((1, 4, 1, 1), 0.3))

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        gx = torch.norm(x, p=2, dim=(2, 3), keepdim=True)
        x = x + self.gamma * x * gx / (gx.mean(dim=1, keepdim=True) + 1e-6)
        return self.fc(F.relu(self.body(x)).mean((2, 3)))


@case("batch statistics by hand", FAMILY)
class OwnBatchNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.body, self.fc = conv(3, 4), conv(4, 4), nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = (x - x.mean(axis=(0, 2, 3), keepdim=True)) / x.std((0, 2, 3), keepdim=True)
        x = F.relu(self.body(x))
        return self.fc(x.mean(axis=(2, 3)) / x.abs().max())


@case("minibatch deviation", FAMILY)
class MinibatchDeviation(nn.Module):
    """Of progressive GANs: how far the samples differ, as one more channel."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.body, self.fc = conv(3, 4), conv(5, 4), nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = F.leaky_relu(self.stem(x), 0.2)
        n, _, h, w = x.shape
        deviation = torch.sqrt(x.var(0, unbiased=False) + 1e-8).mean().view(1, 1, 1, 1)
        x = torch.cat([x, deviation.repeat(n, 1, h, w)], 1)
        return self.fc(F.relu(self.body(x)).mean((2, 3)))


@case("CoordConv (constants of the image's size)", FAMILY)
class CoordConv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2, self.fc = conv(5, 4), conv(6, 4), nn.Linear(4, CLASSES)

    def coordinates(self, x: Tensor) -> Tensor:
        n, _, h, w = x.size()
        rows = torch.linspace(-1, 1, h, dtype=x.dtype).view(1, 1, h, 1).expand(n, 1, h, w)
        columns = torch.linspace(-1, 1, w, dtype=x.dtype).view(1, 1, 1, w).expand(n, 1, h, w)
        return torch.cat([x, rows, columns], dim=1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv1(self.coordinates(x)))
        x = F.relu(self.conv2(self.coordinates(x)))
        return self.fc(x.mean((2, 3)))


@case("BatchNorm over tokens", FAMILY)
class TokenNorm(nn.Module):
    """A projection whose BatchNorm sees all tokens of all samples as rows."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.norm, self.fc = (
            nn.Conv2d(3, 6, 4, 4),
            nn.BatchNorm1d(6),
            nn.Linear(6, CLASSES),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        b, n, c = x.shape
        x = F.relu(self.norm(x.reshape(b * n, c)).reshape(b, n, c))
        return self.fc(x.mean(1))


@case("handed-off branch joins the tiles", FAMILY)
class Joining(nn.Module):
    """A context of the whole image, computed from all pixels, beside each pixel."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.context = conv(3, 4), nn.Linear(4 * 256, 2)
        self.body, self.fc = conv(6, 4), nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        context = self.context(x.flatten(1))[:, :, None, None]
        x = torch.cat([x, context.expand(-1, -1, x.shape[2], x.shape[3])], 1)
        return self.fc(F.relu(self.body(x)).mean((2, 3)))


@case("branch on a size (cannot be traced)", FAMILY)
class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.body, self.fc = conv(3, 4), conv(4, 4), nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.stem(x))
        if out.shape[2] > 8 and float(out.shape[0]) > 1:
            out = F.max_pool2d(out, 2)
        return self.fc(F.relu(self.body(out)).sum(axis=(2, 3)))


@case("weights by attention (dynamic convolution)", FAMILY)
class DynamicConv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.fc = conv(3, 4, 3, 2), nn.Linear(4, CLASSES)
        self.attention, self.weight = (
            nn.Linear(4, 3),
            nn.Parameter(torch.randn(3, 4, 4, 3, 3) * 0.2),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        b, c, h, w = x.shape
        a = F.softmax(self.attention(x.mean((2, 3))), dim=1)
        weight = torch.mm(a, self.weight.view(3, -1)).view(b * 4, c, 3, 3)
        out = F.conv2d(x.reshape(1, b * c, h, w), weight, padding=1, groups=b).view(b, 4, h, w)
        return self.fc(F.relu(out).mean((2, 3)))


class ScaledGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(x, scale)
        return x * scale

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, scale = ctx.saved_tensors
        return gradient * 0.5, (gradient * x).sum((0, 2, 3), keepdim=True)[0] / scale.numel()


@case("learned scale with its own backward (LSQ)", FAMILY)
class LearnedScale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.body, self.fc = conv(3, 4), conv(4, 4), nn.Linear(4, CLASSES)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 4).view(4, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = ScaledGradient.apply(F.relu(self.stem(x)), self.scale)
        return self.fc(F.relu(self.body(x)).mean((2, 3)))
