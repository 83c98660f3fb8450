"""Stochastic gradient descent, as `torch.optim.SGD` does it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.optim.sgd import sgd

from farandole.errors import UserError
from farandole.server.rules.pieces import pieces
from farandole.server.rules.rule import Rule, require_at_least


@dataclass(frozen=True)
class Sgd(Rule):
    """With momentum, Nesterov's too, and weight decay."""

    name: ClassVar[str] = "sgd"

    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    dampening: float = 0.0  # of what enters the momentum, except in the table's first step
    maximize: bool = False  # go up the gradient

    def __post_init__(self) -> None:
        require_at_least(self, "momentum", 0)
        require_at_least(self, "weight_decay", 0)
        if not math.isfinite(self.dampening):
            raise UserError(f"{self.name}: dampening={self.dampening:g} must be a number.")
        if self.nesterov and (not self.momentum or self.dampening):
            raise UserError(
                f"{self.name}: nesterov needs a momentum and no dampening; momentum="
                f"{self.momentum:g} and dampening={self.dampening:g}. Write, for instance, "
                "sgd:momentum=0.9,nesterov."
            )

    @property
    def slots(self) -> tuple[str, ...]:
        return ("momentum",) if self.momentum else ()

    def update(
        self,
        weight: torch.Tensor,
        gradient: torch.Tensor,
        state: Sequence[torch.Tensor],
        rate: float,
        step: int,
    ) -> None:
        for part, slope, momentum in pieces(weight, gradient, state):
            sgd(
                [part],
                [slope],
                [momentum[0] if self.momentum else None],
                fused=False,  # that rounds otherwise; so these are the bits of a step on a worker
                foreach=False,
                weight_decay=self.weight_decay,
                momentum=self.momentum,
                lr=rate,
                # Torch's momentum begins as the first gradient, whole; ours, at 0, must too.
                dampening=self.dampening if step > 1 else 0.0,
                nesterov=self.nesterov,
                maximize=self.maximize,
            )
