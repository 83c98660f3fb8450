"""Series, words, films: 1-D and 3-D convolutions, recurrent layers, embeddings."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from tests.zoo.registry import CLASSES, case, conv, conv_norm_relu, numbers, whole_numbers

FAMILY = "series, text and video"


def sequence_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs.transpose(1, 2), targets)


@case(
    "CRNN (convolutions, then an LSTM)",
    FAMILY,
    inputs=numbers(1, 8, 16),
    targets=whole_numbers(CLASSES, 8),
    loss=sequence_loss,
)
class Crnn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cnn = nn.Sequential(
            conv_norm_relu(1, 4), nn.MaxPool2d(2), conv_norm_relu(4, 4), nn.MaxPool2d((4, 1))
        )
        self.rnn = nn.LSTM(4, 5, bidirectional=True)
        self.embedding = nn.Linear(10, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        features = self.cnn(x)
        assert features.size(2) == 1
        recurrent, _ = self.rnn(features.squeeze(2).permute(2, 0, 1))
        t, b, h = recurrent.size()
        out = self.embedding(recurrent.view(t * b, h)).view(t, b, -1)
        return out.permute(1, 0, 2)


@case("WaveNet", FAMILY, inputs=numbers(1, 24), targets=whole_numbers(CLASSES, 24), axes=1)
class WaveNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.causal = nn.Conv1d(1, 4, 2, padding=1)
        self.gates = nn.ModuleList([nn.Conv1d(4, 8, 2, dilation=2**i) for i in range(3)])
        self.residual = nn.ModuleList([nn.Conv1d(4, 4, 1) for _ in range(3)])
        self.skips, self.end = (
            nn.ModuleList([nn.Conv1d(4, 4, 1) for _ in range(3)]),
            nn.Conv1d(4, CLASSES, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.causal(x)[:, :, :-1]
        skip = torch.zeros((), dtype=x.dtype)
        for i, (gate, residual, skips) in enumerate(
            zip(self.gates, self.residual, self.skips, strict=True)
        ):
            a, b = gate(F.pad(x, (2**i, 0))).chunk(2, 1)
            z = torch.tanh(a) * torch.sigmoid(b)
            skip = skips(z) + skip
            x = x + residual(z)
        return self.end(F.relu(skip))


class Chomp(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def forward(self, x: Tensor) -> Tensor:
        return x[:, :, : -self.size].contiguous()


class TemporalBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, dilation: int) -> None:
        super().__init__()
        pad = 2 * dilation
        self.net = nn.Sequential(
            weight_norm(nn.Conv1d(inputs, outputs, 3, padding=pad, dilation=dilation)),
            Chomp(pad),
            nn.ReLU(),
            weight_norm(nn.Conv1d(outputs, outputs, 3, padding=pad, dilation=dilation)),
            Chomp(pad),
            nn.ReLU(),
        )
        self.downsample = nn.Conv1d(inputs, outputs, 1) if inputs != outputs else None

    def forward(self, x: Tensor) -> Tensor:
        res = x if self.downsample is None else self.downsample(x)
        return F.relu(self.net(x) + res)


@case("TCN (weight_norm)", FAMILY, inputs=numbers(2, 24), axes=1)
class Tcn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tcn = nn.Sequential(TemporalBlock(2, 4, 1), TemporalBlock(4, 4, 2))
        self.linear = nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.tcn(x)[:, :, -1])


@case(
    "Conv-TasNet (mask)",
    FAMILY,
    inputs=numbers(1, 32),
    targets=numbers(2, 32),
    loss=F.mse_loss,
    axes=1,
)
class TasNet(nn.Module):
    """A mask for each of two sources, of an encoding."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = (
            nn.Conv1d(1, 6, 4, 2, 1, bias=False),
            nn.ConvTranspose1d(6, 1, 4, 2, 1, bias=False),
        )
        self.separate = nn.Sequential(
            nn.GroupNorm(1, 6),
            nn.Conv1d(6, 6, 3, padding=1, groups=6),
            nn.PReLU(),
            nn.Conv1d(6, 12, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        w = self.encoder(x)
        n, c, length = w.shape
        masks = torch.sigmoid(self.separate(w)).view(n, 2, c, length)
        sources = (masks * w.unsqueeze(1)).view(n * 2, c, length)
        return self.decoder(sources).view(n, 2, -1)


@case("C3D", FAMILY, inputs=numbers(2, 4, 8, 8), axes=3)
def c3d() -> nn.Module:
    return nn.Sequential(
        nn.Conv3d(2, 4, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool3d((1, 2, 2)),
        nn.Conv3d(4, 4, 3, padding=1),
        nn.BatchNorm3d(4),
        nn.ReLU(),
        nn.MaxPool3d(2),
        nn.Flatten(),
        nn.Linear(32, CLASSES),
    )


@case("R(2+1)D", FAMILY, inputs=numbers(2, 4, 8, 8), axes=3)
class R2Plus1D(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv3d(2, 3, (1, 3, 3), padding=(0, 1, 1)),
            nn.BatchNorm3d(3),
            nn.ReLU(inplace=True),
            nn.Conv3d(3, 4, (3, 1, 1), padding=(1, 0, 0)),
            nn.BatchNorm3d(4),
            nn.ReLU(inplace=True),
        )
        self.block = nn.Sequential(
            nn.Conv3d(4, 4, (1, 3, 3), padding=(0, 1, 1)),
            nn.ReLU(),
            nn.Conv3d(4, 4, (3, 1, 1), padding=(1, 0, 0)),
        )
        self.avgpool, self.fc = nn.AdaptiveAvgPool3d((1, 1, 1)), nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = F.relu(x + self.block(x))
        return self.fc(self.avgpool(x).flatten(1))


@case("time-distributed CNN", FAMILY, inputs=numbers(3, 2, 8, 8), axes=3)
class TimeDistributed(nn.Module):
    """Every picture of a film for itself, then a GRU over the film."""

    def __init__(self) -> None:
        super().__init__()
        self.cnn = nn.Sequential(
            conv_norm_relu(2, 4), nn.MaxPool2d(2), conv(4, 4), nn.AdaptiveAvgPool2d(1)
        )
        self.gru, self.fc = nn.GRU(4, 5, batch_first=True), nn.Linear(5, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c, h, w = x.shape
        features = self.cnn(x.view(b * t, c, h, w)).view(b, t, -1)
        _, hidden = self.gru(features)
        return self.fc(hidden[-1])


class CausalAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(8, 24), nn.Linear(8, 8)
        self.register_buffer("mask", torch.tril(torch.ones(16, 16)).view(1, 1, 16, 16))

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.size()
        q, k, v = (
            each.view(b, t, 2, c // 2).transpose(1, 2) for each in self.qkv(x).split(c, dim=2)
        )
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.mask[:, :, :t, :t] == 0, float("-inf"))
        return self.proj((F.softmax(att, dim=-1) @ v).transpose(1, 2).contiguous().view(b, t, c))


class GptBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.attn, self.ln_2 = nn.LayerNorm(8), CausalAttention(), nn.LayerNorm(8)
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


@case(
    "GPT (tied weights)",
    FAMILY,
    inputs=whole_numbers(11, 10),
    targets=whole_numbers(11, 10),
    loss=sequence_loss,
    axes=0,
)
class Gpt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(11, 8), nn.Embedding(16, 8)
        self.h = nn.ModuleList([GptBlock(), GptBlock()])
        self.ln_f, self.lm_head = nn.LayerNorm(8), nn.Linear(8, 11, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, ids: Tensor) -> Tensor:
        pos = torch.arange(0, ids.size(1), dtype=torch.long)
        x = self.wte(ids) + self.wpe(pos)
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


@case("BERT (padding mask)", FAMILY, inputs=whole_numbers(9, 8), axes=0)
class Bert(nn.Module):
    """Word 0 is padding, which nobody attends to."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.positions = (
            nn.Embedding(9, 8, padding_idx=0),
            nn.Parameter(torch.randn(8, 8)),
        )
        self.layers = nn.ModuleList(
            [nn.TransformerEncoderLayer(8, 2, 12, 0.0, batch_first=True) for _ in range(2)]
        )
        self.pooler, self.classify = nn.Linear(8, 8), nn.Linear(8, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        padding = ids.eq(0) & (torch.arange(ids.shape[1]) > 0)
        x = self.words(ids) + self.positions[: ids.shape[1]]
        for layer in self.layers:
            x = layer(x, src_key_padding_mask=padding)
        return self.classify(torch.tanh(self.pooler(x[:, 0])))


@case("text CNN", FAMILY, inputs=whole_numbers(9, 12), axes=0)
class TextCnn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, 5)
        self.convs = nn.ModuleList([nn.Conv2d(1, 3, (size, 5)) for size in (2, 3, 4)])
        self.fc = nn.Linear(9, CLASSES)

    def forward(self, words: Tensor) -> Tensor:
        x = self.embedding(words).unsqueeze(1)
        found = [F.relu(each(x)).squeeze(3) for each in self.convs]
        return self.fc(
            torch.cat([F.max_pool1d(each, each.size(2)).squeeze(2) for each in found], 1)
        )
