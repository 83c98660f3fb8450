"""A small GPT in the way of nanoGPT: it asserts, unpacks shapes, and computes its own loss."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WORDS = 11


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, longest: int, dropout: float) -> None:
        super().__init__()
        assert width % heads == 0
        self.both, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.heads, self.width, self.dropout = heads, width, dropout
        self.register_buffer("seen", torch.ones(longest, longest).tril()[None, None])

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.size()
        query, key, value = (
            each.view(b, t, self.heads, c // self.heads).transpose(1, 2)
            for each in self.both(x).split(self.width, dim=2)
        )
        scores = (query @ key.transpose(-2, -1)) * (1.0 / math.sqrt(key.size(-1)))
        scores = scores.masked_fill(self.seen[:, :, :t, :t] == 0, float("-inf"))
        scores = F.dropout(scores.softmax(-1), self.dropout if self.training else 0.0)
        return self.out((scores @ value).transpose(1, 2).contiguous().view(b, t, c))


class Layer(nn.Module):
    def __init__(self, width: int, heads: int, longest: int, dropout: float) -> None:
        super().__init__()
        self.before, self.attention = nn.LayerNorm(width), Attention(width, heads, longest, dropout)
        self.between = nn.LayerNorm(width)
        self.inner = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.before(x))
        return x + self.inner(self.between(x))


class GPT(nn.Module):
    """`ignored` targets do not count."""

    def __init__(
        self,
        width: int = 8,
        heads: int = 2,
        layers: int = 4,
        longest: int = 16,
        dropout: float = 0.0,
        ignored: int = -1,
    ) -> None:
        super().__init__()
        self.longest, self.ignored = longest, ignored
        self.words, self.places = nn.Embedding(WORDS, width), nn.Embedding(longest, width)
        self.layers = nn.ModuleList(Layer(width, heads, longest, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, WORDS, bias=False)
        self.words.weight = self.head.weight

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        _, t = idx.size()
        assert t <= self.longest, f"a sequence of {t}, and the longest is {self.longest}"
        x = self.words(idx) + self.places(torch.arange(0, t, dtype=torch.long, device=idx.device))
        for layer in self.layers:
            x = layer(x)
        x = self.norm(x)
        if targets is None:
            return self.head(x[:, [-1], :]), None
        logits = self.head(x)
        flat = logits.view(-1, logits.size(-1))
        return logits, F.cross_entropy(flat, targets.view(-1), ignore_index=self.ignored)
