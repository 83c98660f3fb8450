"""Adds what is pushed: for updates that workers have made themselves, for counts and for sums."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from farandole.server.rules.pieces import pieces
from farandole.server.rules.rule import Rule


@dataclass(frozen=True)
class Add(Rule):
    """w ← w + rate · g. In a table of whole numbers rate · g is rounded to one."""

    name: ClassVar[str] = "add"
    takes_integers: ClassVar[bool] = True

    def update(
        self,
        weight: torch.Tensor,
        gradient: torch.Tensor,
        state: Sequence[torch.Tensor],
        rate: float,
        step: int,
    ) -> None:
        if weight.is_floating_point():
            for part, change, _ in pieces(weight, gradient):
                part.add_(change, alpha=rate)
        elif float(rate).is_integer():
            weight.add_(gradient, alpha=int(rate))
        else:
            weight.add_(gradient.double().mul_(rate).round_().to(weight.dtype))
