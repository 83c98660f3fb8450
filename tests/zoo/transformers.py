"""Vision models made of attention or of mixing tokens."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.cnns import DropPath, InvertedResidual
from tests.zoo.registry import CLASSES, case, conv, conv_norm_relu

FAMILY = "transformers and mixers"


class Attention(nn.Module):
    def __init__(self, width: int, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, n, c = x.shape
        qkv = self.qkv(x).reshape(b, n, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        q, k, v = qkv[0], qkv[1], qkv[2]
        attn = (q @ k.transpose(-2, -1)) * (c // self.heads) ** -0.5
        x = (attn.softmax(dim=-1) @ v).transpose(1, 2).reshape(b, n, c)
        return self.proj(x)


class Mlp(nn.Sequential):
    def __init__(self, width: int) -> None:
        super().__init__(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))


class EncoderBlock(nn.Module):
    def __init__(self, width: int, drop: float = 0.0) -> None:
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(width), Attention(width)
        self.norm2, self.mlp = nn.LayerNorm(width), Mlp(width)
        self.drop_path = DropPath(drop) if drop else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop_path(self.attn(self.norm1(x)))
        return x + self.drop_path(self.mlp(self.norm2(x)))


@case("ViT", FAMILY, draws=True)
class ViT(nn.Module):
    """The class token is expanded to the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(3, 8, 4, 4)
        self.cls_token = nn.Parameter(torch.randn(1, 1, 8) * 0.1)
        self.pos_embed = nn.Parameter(torch.randn(1, 17, 8) * 0.1)
        self.pos_drop = nn.Dropout(0.1)
        self.blocks = nn.ModuleList([EncoderBlock(8, 0.1) for _ in range(2)])
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch_embed(x).flatten(2).transpose(1, 2)
        x = torch.cat((self.cls_token.expand(x.shape[0], -1, -1), x), dim=1)
        x = self.pos_drop(x + self.pos_embed)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])


@case("ViT (nn.TransformerEncoder)", FAMILY)
class TorchViT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 8, 4, 4)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x)
        n, c, h, w = x.shape
        x = x.reshape(n, c, h * w).permute(0, 2, 1)
        return self.head(self.encoder(x).mean(dim=1))


@case("DeiT (tokens by repeat)", FAMILY)
class DeiT(nn.Module):
    """A class and a distillation token; two heads, whose mean is the prediction."""

    def __init__(self) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(3, 8, 4, 4)
        self.cls, self.dist = nn.Parameter(torch.randn(1, 1, 8)), nn.Parameter(torch.randn(1, 1, 8))
        self.pos_embed = nn.Parameter(torch.randn(1, 18, 8) * 0.1)
        self.blocks = nn.Sequential(EncoderBlock(8), EncoderBlock(8))
        self.norm, self.head, self.head_dist = (
            nn.LayerNorm(8),
            nn.Linear(8, CLASSES),
            nn.Linear(8, CLASSES),
        )

    def forward(self, x: Tensor) -> Tensor:
        b = x.shape[0]
        x = self.patch_embed(x).flatten(2).transpose(1, 2)
        x = torch.cat((self.cls.repeat(b, 1, 1), self.dist.repeat(b, 1, 1), x), dim=1)
        x = self.norm(self.blocks(x + self.pos_embed))
        return (self.head(x[:, 0]) + self.head_dist(x[:, 1])) / 2


def window_partition(x: Tensor, size: int) -> Tensor:
    b, h, w, c = x.shape
    x = x.view(b, h // size, size, w // size, size, c)
    return x.permute(0, 1, 3, 2, 4, 5).contiguous().view(-1, size, size, c)


def window_reverse(windows: Tensor, size: int, h: int, w: int) -> Tensor:
    b = int(windows.shape[0] / (h * w / size / size))
    x = windows.view(b, h // size, w // size, size, size, -1)
    return x.permute(0, 1, 3, 2, 4, 5).contiguous().view(b, h, w, -1)


class SwinBlock(nn.Module):
    def __init__(self, width: int, shift: int) -> None:
        super().__init__()
        self.shift, self.size = shift, 4
        self.norm1, self.attn = nn.LayerNorm(width), Attention(width)
        self.norm2, self.mlp = nn.LayerNorm(width), Mlp(width)

    def forward(self, x: Tensor) -> Tensor:
        _, h, w, c = x.shape
        shortcut = x
        x = self.norm1(x)
        if self.shift > 0:
            x = torch.roll(x, shifts=(-self.shift, -self.shift), dims=(1, 2))
        windows = window_partition(x, self.size).view(-1, self.size * self.size, c)
        windows = self.attn(windows).view(-1, self.size, self.size, c)
        x = window_reverse(windows, self.size, h, w)
        if self.shift > 0:
            x = torch.roll(x, shifts=(self.shift, self.shift), dims=(1, 2))
        x = shortcut + x
        return x + self.mlp(self.norm2(x))


class PatchMerging(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.reduction = (
            nn.LayerNorm(4 * width),
            nn.Linear(4 * width, 2 * width, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        parts = [x[:, i::2, j::2, :] for j in range(2) for i in range(2)]
        return self.reduction(self.norm(torch.cat(parts, -1)))


@case("Swin", FAMILY)
class Swin(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(3, 4, 2, 2)
        self.layers = nn.Sequential(
            SwinBlock(4, 0), SwinBlock(4, 2), PatchMerging(4), SwinBlock(8, 0)
        )
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.layers(self.patch_embed(x).permute(0, 2, 3, 1)))
        return self.head(torch.flatten(x, 1, 2).mean(1))


class MobileViTBlock(nn.Module):
    """Unfolds the image into patches, attends between them, folds it again."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.local, self.transformer = conv_norm_relu(width, width), EncoderBlock(width)
        self.fusion = conv(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.local(x)
        b, d, h, w = y.shape
        y = y.reshape(b * d * h // 2, 2, w // 2, 2).transpose(1, 2)
        y = y.reshape(b, d, h * w // 4, 4).permute(0, 3, 2, 1).reshape(b * 4, h * w // 4, d)
        y = self.transformer(y)
        y = y.view(b, 4, h * w // 4, d).permute(0, 3, 2, 1).reshape(b * d * h // 2, w // 2, 2, 2)
        y = y.transpose(1, 2).reshape(b, d, h, w)
        return self.fusion(torch.cat((x, y), 1))


@case("MobileViT", FAMILY)
def mobilevit() -> nn.Module:
    last = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, CLASSES)]
    return nn.Sequential(
        conv_norm_relu(3, 4, 3, 2), InvertedResidual(4, 4), MobileViTBlock(4), *last
    )


@case("PVT (spatial reduction)", FAMILY)
class Pvt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch, self.sr = nn.Conv2d(3, 4, 2, 2), nn.Conv2d(4, 4, 2, 2)
        self.norm, self.q, self.kv = nn.LayerNorm(4), nn.Linear(4, 4), nn.Linear(4, 8)
        self.mlp, self.head = Mlp(4), nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x)
        b, c, h, w = x.shape
        x = x.flatten(2).transpose(1, 2)
        reduced = self.sr(x.permute(0, 2, 1).reshape(b, c, h, w)).reshape(b, c, -1).permute(0, 2, 1)
        k, v = self.kv(self.norm(reduced)).chunk(2, dim=-1)
        x = x + F.scaled_dot_product_attention(self.q(x), k, v)
        x = x + self.mlp(x)
        return self.head(x.mean(dim=1))


class MixerBlock(nn.Module):
    def __init__(self, tokens: int, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.tokens, self.channels = Mlp(tokens), Mlp(width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        x = x + y
        return x + self.channels(self.norm2(x))


@case("MLP-Mixer", FAMILY)
class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 4, 4)
        self.blocks = nn.Sequential(MixerBlock(16, 6), MixerBlock(16, 6))
        self.norm, self.head = nn.LayerNorm(6), nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).flatten(2).transpose(1, 2)
        return self.head(self.norm(self.blocks(x)).mean(dim=1))


@case("gMLP", FAMILY)
class GMlp(nn.Module):
    """A gate over the sequence, from half of the channels."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.up, self.down = nn.Conv2d(3, 6, 4, 4), nn.Linear(6, 8), nn.Linear(4, 6)
        self.norm, self.gate = nn.LayerNorm(4), nn.Conv1d(16, 16, 1)
        self.head = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).flatten(2).permute(0, 2, 1)
        u, v = F.gelu(self.up(x)).chunk(2, -1)
        x = x + self.down(u * self.gate(self.norm(v)))
        return self.head(x.mean(1))


@case("Perceiver", FAMILY)
class Perceiver(nn.Module):
    """A few latent vectors attend to all pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = conv(3, 6)
        self.latents = nn.Parameter(torch.randn(3, 6))
        self.cross = nn.MultiheadAttention(6, 2, batch_first=True)
        self.block, self.head = EncoderBlock(6), nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        b = x.shape[0]
        pixels = x.permute(0, 2, 3, 1).reshape(b, -1, x.shape[1])
        latents = self.latents.unsqueeze(0).expand(b, -1, -1)
        found, _ = self.cross(latents, pixels, pixels, need_weights=False)
        return self.head(self.block(latents + found).mean(1))


class NonLocal(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.theta, self.phi, self.g = conv(width, 2, 1), conv(width, 2, 1), conv(width, 2, 1)
        self.out = conv(2, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        n = x.size(0)
        g = self.g(x).view(n, 2, -1).permute(0, 2, 1)
        theta, phi = self.theta(x).view(n, 2, -1).permute(0, 2, 1), self.phi(x).view(n, 2, -1)
        attention = F.softmax(torch.matmul(theta, phi), dim=-1)
        y = torch.matmul(attention, g).permute(0, 2, 1).contiguous().view(n, 2, *x.size()[2:])
        return x + self.out(y)


@case("non-local network", FAMILY)
def non_local() -> nn.Module:
    last = [conv_norm_relu(4, 4), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, CLASSES)]
    return nn.Sequential(conv_norm_relu(3, 4, 3, 2), NonLocal(4), *last)


@case("CoAtNet (attention between pools)", FAMILY)
class CoAtNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.s0, self.s1 = conv_norm_relu(3, 4, 3, 2), InvertedResidual(4, 4)
        self.pool, self.attn = nn.MaxPool2d(3, 2, 1), EncoderBlock(4)
        self.last, self.fc = conv(4, 6), nn.Linear(6, CLASSES, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(self.s1(self.s0(x)))
        b, c, h, w = x.shape
        x = self.attn(x.flatten(2).transpose(1, 2)).transpose(1, 2).reshape(b, c, h, w)
        return self.fc(F.relu(self.last(x)).amax(dim=(2, 3)))
