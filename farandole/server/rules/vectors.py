"""Several vectors whose rows are on the same servers, for algorithms that combine them there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from farandole.errors import UserError
from farandole.server.rules.add import Add
from farandole.server.rules.rule import Rule

_MOST = 4096


@dataclass(frozen=True)
class Vectors(Rule):
    """The table has `count` vectors, slots 0 to `count` - 1. A push is added to the first."""

    name: ClassVar[str] = "vectors"
    count: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.count <= _MOST:
            raise UserError(f"vectors: count={self.count}: give 1 to {_MOST}.")

    @property
    def slots(self) -> tuple[str, ...]:
        return tuple(f"vector {number}" for number in range(1, self.count))

    def update(
        self,
        weight: torch.Tensor,
        gradient: torch.Tensor,
        state: Sequence[torch.Tensor],
        rate: float,
        step: int,
    ) -> None:
        Add().update(weight, gradient, (), rate, step)
