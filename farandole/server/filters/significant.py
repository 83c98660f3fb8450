"""Sends a row when what has gathered for it is large beside the row itself.

After Gaia (Hsieh et al., 2017): most updates change a weight by far less than a hundredth, and can
wait until they have added up. What is compared is what is pushed: under the rule `add` an update,
under others a gradient, before the rate.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from farandole.server.filters.filter import (
    Filter,
    Sieve,
    largest_of_rows,
    require_at_least,
    require_float,
)
from farandole.server.filters.residual_sieve import ResidualSieve


@dataclass(frozen=True)
class Significant(Filter):
    """Largest gathered number > threshold × largest weight of the row. The rest gathers on."""

    name: ClassVar[str] = "significant"
    needs_weight: ClassVar[bool] = True

    threshold: float = 0.01

    def __post_init__(self) -> None:
        require_at_least(self, "threshold", 0)

    def build(self, rows: int, width: int, dtype: torch.dtype, stream: str = "") -> Sieve:
        require_float(self, dtype)
        return _SignificantSieve(self, rows, width, dtype)


class _SignificantSieve(ResidualSieve):
    def __init__(self, filter_: Significant, rows: int, width: int, dtype: torch.dtype) -> None:
        super().__init__(filter_, rows, width, dtype)
        self._threshold = filter_.threshold

    def _are_sent(self, gathered: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        assert weight is not None
        # A weight of 0 stands for the least number there is: beside it any update is large.
        seen = largest_of_rows(weight).clamp_(min=torch.finfo(weight.dtype).tiny)
        return ~(largest_of_rows(gathered) <= self._threshold * seen)  # NaN does not wait
