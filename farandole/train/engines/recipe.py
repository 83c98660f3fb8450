"""What a trainer minimises, and how."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim import Optimizer

from farandole.errors import UserError
from farandole.layout.objective import LossFunction, LossWeight, Objective

MakeOptimizer = Callable[[Iterator[nn.Parameter]], Optimizer]


@dataclass(frozen=True)
class Recipe:
    """`loss(model(x), y)`, or the model's own loss, by `make_optimizer(parameters)`."""

    loss: LossFunction | None
    make_optimizer: MakeOptimizer
    clip: float | None = None  # the largest norm that a gradient may have
    precision: torch.dtype | None = None  # of what autocast lowers
    loss_weight: LossWeight | None = None  # what a micro-batch counts by; None: its samples

    @property
    def objective(self) -> Objective:
        return Objective(self.loss, self.loss_weight)

    def __post_init__(self) -> None:
        if self.clip is not None and not self.clip > 0:
            raise UserError(f"clip={self.clip:g} must be above 0: it is the norm of a gradient.")
        if self.precision not in (None, torch.bfloat16, torch.float16):
            raise UserError(
                f"precision={self.precision} is none that autocast knows: torch.bfloat16 or "
                "torch.float16. Leave it out for the model's own."
            )
