"""Proximal gradient descent: models whose weights are mostly exactly 0.

A step down the gradient of the loss, and then the step that the penalty l1 · |w| + l2 · w² / 2 asks
for, in closed form: towards 0 by rate · l1, and no further.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from farandole.server.rules.pieces import pieces
from farandole.server.rules.rule import Rule, require_at_least


@dataclass(frozen=True)
class Proximal(Rule):
    """w ← soft(w − rate · g, rate · l1) / (1 + rate · l2).

    With `adaptive` each weight has a rate of its own, rate / (1 + sqrt(Σ g²)): those of rare
    features move further. The 1 keeps a penalty on a weight that has no gradient yet finite, as in
    McMahan et al. (2013).
    """

    name: ClassVar[str] = "proximal"

    l1: float = 0.0
    l2: float = 0.0
    adaptive: bool = False

    def __post_init__(self) -> None:
        require_at_least(self, "l1", 0)
        require_at_least(self, "l2", 0)

    @property
    def slots(self) -> tuple[str, ...]:
        return ("square_sum",) if self.adaptive else ()

    def update(
        self,
        weight: torch.Tensor,
        gradient: torch.Tensor,
        state: Sequence[torch.Tensor],
        rate: float,
        step: int,
    ) -> None:
        for part, slope, square_sum in pieces(weight, gradient, state):
            if self.adaptive:
                self._step_adaptively(part, slope, square_sum[0], rate)
            else:
                self._step(part, slope, rate)

    def _step(self, weight: torch.Tensor, gradient: torch.Tensor, rate: float) -> None:
        weight.add_(gradient, alpha=-rate)
        if self.l1:
            # What is nearer to 0 than that is taken from itself, and is exactly 0.
            weight.sub_(weight.clamp(-rate * self.l1, rate * self.l1))
        if self.l2:
            weight.div_(1 + rate * self.l2)

    def _step_adaptively(
        self, weight: torch.Tensor, gradient: torch.Tensor, square_sum: torch.Tensor, rate: float
    ) -> None:
        square_sum.addcmul_(gradient, gradient)
        rates = square_sum.sqrt().add_(1).reciprocal_().mul_(rate)
        weight.addcmul_(rates, gradient, value=-1)
        if self.l1:
            bounds = rates * self.l1
            weight.sub_(weight.clamp(-bounds, bounds))
        if self.l2:
            weight.div_(rates.mul_(self.l2).add_(1))
