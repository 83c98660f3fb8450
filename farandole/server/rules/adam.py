"""Adam and AdamW, as `torch.optim` does them.

A row that is pushed now and then keeps its moments in between, as in `torch.optim.SparseAdam`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.optim.adam import adam

from farandole.server.rules.pieces import pieces
from farandole.server.rules.rule import Rule, require_at_least, require_share


@dataclass(frozen=True)
class Adam(Rule):
    """Weight decay is added to the gradient."""

    name: ClassVar[str] = "adam"
    decoupled: ClassVar[bool] = False

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    amsgrad: bool = False  # divide by the largest second moment so far
    maximize: bool = False  # go up the gradient

    def __post_init__(self) -> None:
        require_share(self, "beta1")
        require_share(self, "beta2")
        require_at_least(self, "eps", 0)
        require_at_least(self, "weight_decay", 0)

    @property
    def slots(self) -> tuple[str, ...]:
        moments = ("first_moment", "second_moment")
        return (*moments, "largest_second_moment") if self.amsgrad else moments

    def update(
        self,
        weight: torch.Tensor,
        gradient: torch.Tensor,
        state: Sequence[torch.Tensor],
        rate: float,
        step: int,
    ) -> None:
        for part, slope, (first, second, *largest) in pieces(weight, gradient, state):
            adam(
                [part],
                [slope],
                [first],
                [second],
                largest,
                [torch.tensor(step - 1, dtype=torch.float64)],  # torch counts this one itself
                fused=True,  # one pass over memory, where separate operations take eight
                decoupled_weight_decay=self.decoupled,
                amsgrad=self.amsgrad,
                beta1=self.beta1,
                beta2=self.beta2,
                lr=rate,
                weight_decay=self.weight_decay,
                eps=self.eps,
                maximize=self.maximize,
            )


@dataclass(frozen=True)
class AdamW(Adam):
    """Weight decay is taken from the weights themselves."""

    name: ClassVar[str] = "adamw"
    decoupled: ClassVar[bool] = True

    weight_decay: float = 0.01
