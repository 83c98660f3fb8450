"""Models that make images, and what trains them: VAE, VQ-VAE, GAN, diffusion, domain adaptation."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

from tests.zoo.registry import CLASSES, IMAGES, LABELS, case, conv, numbers, several

FAMILY = "generative and adversarial"


def autoencoder_loss(outputs: tuple[Tensor, ...], targets: Tensor) -> Tensor:
    found, mu, logvar = outputs
    kld = -0.5 * (1 + logvar - mu.pow(2) - logvar.exp()).sum(1).mean()
    return F.mse_loss(found, targets) + 0.1 * kld


@case("VAE (reparameterisation)", FAMILY, targets=IMAGES, loss=autoencoder_loss, draws=True)
class Vae(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(conv(3, 4, 3, 2), nn.ReLU(), conv(4, 4, 3, 2), nn.ReLU())
        self.fc_mu, self.fc_var, self.fc = nn.Linear(64, 3), nn.Linear(64, 3), nn.Linear(3, 64)
        self.decoder = nn.Sequential(
            nn.ConvTranspose2d(4, 4, 4, 2, 1), nn.ReLU(), nn.ConvTranspose2d(4, 3, 4, 2, 1)
        )

    def reparameterize(self, mu: Tensor, logvar: Tensor) -> Tensor:
        std = torch.exp(0.5 * logvar)
        return mu + (torch.randn_like(std) + 0.5) * std

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = torch.flatten(self.encoder(x), start_dim=1)
        mu, logvar = self.fc_mu(hidden), self.fc_var(hidden)
        z = self.fc(self.reparameterize(mu, logvar)).view(-1, 4, 4, 4)
        return self.decoder(z), mu, logvar


def quantised_loss(outputs: tuple[Tensor, Tensor], targets: Tensor) -> Tensor:
    return F.mse_loss(outputs[0], targets) + outputs[1]


class Quantizer(nn.Module):
    """The nearest of some vectors, for every place; the gradient goes straight through."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4)

    def forward(self, latents: Tensor) -> tuple[Tensor, Tensor]:
        latents = latents.permute(0, 2, 3, 1).contiguous()
        flat = latents.view(-1, 4)
        distance = (
            torch.sum(flat**2, dim=1, keepdim=True)
            + torch.sum(self.embedding.weight**2, dim=1)
            - 2 * torch.matmul(flat, self.embedding.weight.t())
        )
        chosen = torch.argmin(distance, dim=1).unsqueeze(1)
        one_hot = torch.zeros(chosen.size(0), 5, dtype=latents.dtype)
        one_hot.scatter_(1, chosen, 1)
        quantized = torch.matmul(one_hot, self.embedding.weight).view(latents.shape)
        loss = 0.25 * F.mse_loss(quantized.detach(), latents) + F.mse_loss(
            quantized, latents.detach()
        )
        quantized = latents + (quantized - latents).detach()
        return quantized.permute(0, 3, 1, 2).contiguous(), loss


@case("VQ-VAE (auxiliary loss)", FAMILY, targets=IMAGES, loss=quantised_loss)
class VqVae(nn.Module):
    """Returns the loss of its codes beside the images."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(3, 4, 4, 2, 1), nn.ReLU(), conv(4, 4))
        self.vq = Quantizer()
        self.decoder = nn.Sequential(conv(4, 4), nn.ReLU(), nn.ConvTranspose2d(4, 3, 4, 2, 1))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        quantized, loss = self.vq(self.encoder(x))
        return self.decoder(quantized), loss


class RoundStraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


@case("quantised CNN (straight-through function)", FAMILY)
class QuantisedCnn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2, self.fc = conv(3, 4), conv(4, 4), nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = RoundStraightThrough.apply(F.relu6(self.conv1(x)) * 4) / 4
        x = F.relu(self.conv2(x))
        return self.fc(x.mean((2, 3)))


@case("DCGAN generator", FAMILY, inputs=numbers(5, 1, 1), targets=IMAGES, loss=F.l1_loss)
def dcgan_generator() -> nn.Module:
    return nn.Sequential(
        nn.ConvTranspose2d(5, 8, 4, 1, 0, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(True),
        nn.ConvTranspose2d(8, 4, 4, 2, 1, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(True),
        nn.ConvTranspose2d(4, 3, 4, 2, 1, bias=False),
        nn.Tanh(),
    )


def hinge(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.relu(1 - outputs * (2 * (targets > 1).to(outputs.dtype) - 1)).mean()


@case("DCGAN discriminator (spectral_norm)", FAMILY, loss=hinge, changes=True)
class Discriminator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.main = nn.Sequential(
            spectral_norm(nn.Conv2d(3, 4, 4, 2, 1)),
            nn.LeakyReLU(0.2, inplace=True),
            spectral_norm(nn.Conv2d(4, 6, 4, 2, 1)),
            nn.LeakyReLU(0.2, inplace=True),
            spectral_norm(nn.Conv2d(6, 1, 4)),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.main(x).view(-1, 1).squeeze(1)


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, alpha: float) -> Tensor:
        ctx.alpha = alpha
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.neg() * ctx.alpha, None


def adversarial_loss(outputs: tuple[Tensor, Tensor], targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs[0], targets) + F.cross_entropy(outputs[1], targets % 2)


@case("DANN (gradient reversal)", FAMILY, loss=adversarial_loss)
class Dann(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            conv(3, 4), nn.BatchNorm2d(4), nn.MaxPool2d(2), nn.ReLU(True), conv(4, 4)
        )
        self.classes, self.domains = nn.Linear(256, CLASSES), nn.Linear(256, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        feature = self.features(x).view(-1, 256)
        return self.classes(feature), self.domains(Reversed.apply(feature, 0.7))


@case("CycleGAN generator (reflection, instance norm)", FAMILY, targets=IMAGES, loss=F.l1_loss)
def cyclegan() -> nn.Module:
    return nn.Sequential(
        nn.ReflectionPad2d(2),
        nn.Conv2d(3, 4, 5),
        nn.InstanceNorm2d(4),
        nn.ReLU(True),
        nn.Conv2d(4, 6, 3, 2, 1),
        nn.InstanceNorm2d(6, affine=True, track_running_stats=True),
        nn.ReLU(True),
        nn.ConvTranspose2d(6, 4, 3, 2, 1, output_padding=1),
        nn.ReLU(True),
        nn.ReplicationPad2d(1),
        nn.Conv2d(4, 3, 3),
        nn.Tanh(),
    )


class Modulated(nn.Module):
    """Of StyleGAN 2: the weights differ from sample to sample, as groups of one convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 3, 3, 3) * 0.2)
        self.style = nn.Linear(5, 3)

    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        b, c, height, width = x.shape
        weight = self.weight[None] * self.style(w)[:, None, :, None, None]
        weight = weight * torch.rsqrt(weight.square().sum(dim=[2, 3, 4], keepdim=True) + 1e-8)
        x = F.conv2d(
            x.reshape(1, b * c, height, width), weight.reshape(-1, c, 3, 3), padding=1, groups=b
        )
        return x.view(b, 4, height, width)


@case(
    "StyleGAN 2 (modulated convolution)",
    FAMILY,
    inputs=several(IMAGES, numbers(5)),
    targets=IMAGES,
    loss=F.mse_loss,
)
class StyleGan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mapping, self.conv, self.rgb = nn.Linear(5, 5), Modulated(), conv(4, 3, 1)

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        w = F.leaky_relu(
            self.mapping(z * torch.rsqrt(z.square().mean(1, keepdim=True) + 1e-8)), 0.2
        )
        return self.rgb(F.leaky_relu(self.conv(x, w), 0.2))


def time_embedding(steps: Tensor, width: int) -> Tensor:
    half = width // 2
    rates = torch.exp(-math.log(10000) * torch.arange(half, dtype=torch.float64) / half)
    angles = steps[:, None].to(torch.float64) * rates[None]
    return torch.cat([torch.cos(angles), torch.sin(angles)], dim=-1)


class TimeBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.norm, self.conv1, self.conv2 = (
            nn.GroupNorm(2, inputs),
            conv(inputs, outputs),
            conv(outputs, outputs),
        )
        self.time, self.skip = nn.Linear(6, outputs), conv(inputs, outputs, 1)

    def forward(self, x: Tensor, emb: Tensor) -> Tensor:
        h = self.conv1(F.silu(self.norm(x)))
        h = h + self.time(F.silu(emb))[:, :, None, None]
        return self.skip(x) + self.conv2(F.silu(h))


@case(
    "diffusion U-Net (time embedding)",
    FAMILY,
    inputs=several(IMAGES, lambda n, g: torch.randint(100, (n,), generator=g)),
    targets=IMAGES,
    loss=F.mse_loss,
)
class DiffusionUNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(6, 6), nn.SiLU(), nn.Linear(6, 6))
        self.stem, self.down, self.mid = conv(3, 4), TimeBlock(4, 4), TimeBlock(4, 6)
        self.up, self.out = TimeBlock(10, 4), conv(4, 3)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        emb = self.time(time_embedding(t, 6))
        h1 = self.down(self.stem(x), emb)
        h2 = self.mid(F.avg_pool2d(h1, 2), emb)
        h = torch.cat([F.interpolate(h2, scale_factor=2, mode="nearest"), h1], dim=1)
        return self.out(self.up(h, emb))


def alpha_loss(outputs: tuple[Tensor, Tensor], targets: Any) -> Tensor:
    return F.cross_entropy(outputs[0], targets) + outputs[1].square().mean()


@case("SimCLR head (normalised, in-batch similarity)", FAMILY, targets=LABELS, loss=alpha_loss)
class SimClr(nn.Module):
    """Normalises its projections; the loss looks at all samples at once."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(
            conv(3, 4, 3, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
        )
        self.project = nn.Sequential(
            nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, CLASSES)
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = self.project(self.backbone(x))
        return z, F.normalize(z, dim=1)
