"""Drops gradients of weights that an L1 penalty holds at 0.

A weight of 0 stays there as long as its gradient is smaller than the penalty: these are the KKT
conditions of the lasso. Sending such a gradient to the rule `proximal` changes nothing (Li et al.,
2014). It is not kept: the next one is computed afresh.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from farandole.server.filters.filter import (
    Filter,
    Rows,
    Sieve,
    largest_of_rows,
    require_at_least,
    require_float,
    require_share,
)


@dataclass(frozen=True)
class Kkt(Filter):
    """Drops rows that are 0 and whose gradient is below l1 by a margin, a share of l1.

    The margin is for gradients that are not exact: of a batch, or of weights that have changed.
    """

    name: ClassVar[str] = "kkt"
    needs_weight: ClassVar[bool] = True

    l1: float = 0.01  # as in the rule
    margin: float = 0.1

    def __post_init__(self) -> None:
        require_at_least(self, "l1", 0)
        require_share(self, "margin")

    def build(self, rows: int, width: int, dtype: torch.dtype, stream: str = "") -> Sieve:
        require_float(self, dtype)
        return _KktSieve(self, rows, width, dtype)


class _KktSieve(Sieve):
    def __init__(self, filter_: Kkt, rows: int, width: int, dtype: torch.dtype) -> None:
        super().__init__(filter_, rows, width, dtype)
        self._bound = filter_.l1 - filter_.margin * filter_.l1

    def _choose(
        self, rows: Rows, values: torch.Tensor, weight: torch.Tensor | None
    ) -> tuple[Rows, torch.Tensor]:
        assert weight is not None
        is_held_at_zero = (weight == 0).all(dim=1) & (largest_of_rows(values) < self._bound)
        return rows[~is_held_at_zero], values[~is_held_at_zero]
