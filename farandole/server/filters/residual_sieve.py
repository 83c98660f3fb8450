"""What sieves have in common that hold rows back: nothing is lost, only late."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import torch

from farandole.server.filters.filter import Filter, Rows, Sieve
from farandole.server.filters.residual import Residual


class ResidualSieve(Sieve):
    """What is not sent of a row is added to its next push."""

    def __init__(self, filter_: Filter, rows: int, width: int, dtype: torch.dtype) -> None:
        super().__init__(filter_, rows, width, dtype)
        self._residual = Residual(rows, width, dtype)

    @abstractmethod
    def _are_sent(self, gathered: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        """For each row, whether what has gathered for it is sent now."""

    def _choose(
        self, rows: Rows, values: torch.Tensor, weight: torch.Tensor | None
    ) -> tuple[Rows, torch.Tensor]:
        gathered = self._residual.plus(rows, values)
        are_sent = self._are_sent(gathered, weight)
        self._residual.replace(rows, gathered.masked_fill(are_sent.unsqueeze(1), 0))
        return rows[are_sent], gathered[are_sent]

    def _take(self) -> tuple[Rows, torch.Tensor]:
        return self._residual.take()

    def state_dict(self) -> dict[str, Any]:
        return self._residual.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._residual.load_state_dict(state)
