"""What a trainer minimises, and how."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from farandole.errors import UserError

LossFunction = Callable[[Any, Any], torch.Tensor]
MakeOptimizer = Callable[[Iterator[nn.Parameter]], Optimizer]


@dataclass(frozen=True)
class Recipe:
    """`loss(model(x), y)` by `make_optimizer(parameters)`."""

    loss: LossFunction
    make_optimizer: MakeOptimizer
    clip: float | None = None  # the largest norm that a gradient may have
    precision: torch.dtype | None = None  # of what autocast lowers

    def __post_init__(self) -> None:
        if self.clip is not None and not self.clip > 0:
            raise UserError(f"clip={self.clip:g} must be above 0: it is the norm of a gradient.")
        if self.precision not in (None, torch.bfloat16, torch.float16):
            raise UserError(
                f"precision={self.precision} is none that autocast knows: torch.bfloat16 or "
                "torch.float16. Leave it out for the model's own."
            )
