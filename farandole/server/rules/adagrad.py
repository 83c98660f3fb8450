"""Adagrad, as `torch.optim.Adagrad` does it: each weight has a rate of its own.

This is also the rule of Downpour SGD (Dean et al., 2012): rate_i = γ / sqrt(Σ g_i²). It suits
workers that come and go, because a weight that has seen many updates moves less and less.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.optim.adagrad import adagrad

from farandole.server.rules.pieces import pieces
from farandole.server.rules.rule import Rule, require_at_least


@dataclass(frozen=True)
class Adagrad(Rule):
    """w ← w − rate · g / (sqrt(Σ g²) + eps)."""

    name: ClassVar[str] = "adagrad"

    eps: float = 1e-10
    initial_sum: float = 0.0  # what Σ g² begins with
    weight_decay: float = 0.0
    rate_decay: float = 0.0  # in step t the rate is divided by 1 + (t − 1) · rate_decay
    maximize: bool = False  # go up the gradient

    def __post_init__(self) -> None:
        for option in ("eps", "initial_sum", "weight_decay", "rate_decay"):
            require_at_least(self, option, 0)

    @property
    def slots(self) -> tuple[str, ...]:
        return ("square_sum",)

    def initial(self, slot: str) -> float:
        return self.initial_sum

    def update(
        self,
        weight: torch.Tensor,
        gradient: torch.Tensor,
        state: Sequence[torch.Tensor],
        rate: float,
        step: int,
    ) -> None:
        for part, slope, square_sum in pieces(weight, gradient, state):
            adagrad(
                [part],
                [slope],
                list(square_sum),
                [torch.tensor(step - 1, dtype=torch.float64)],  # torch counts this one itself
                fused=True,  # one pass over memory, where separate operations take five
                lr=rate,
                weight_decay=self.weight_decay,
                lr_decay=self.rate_decay,
                eps=self.eps,
                maximize=self.maximize,
            )
