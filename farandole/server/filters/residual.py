"""What a client has not sent yet, of every row: nothing is lost, only late.

This takes as much memory as the table itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

Which = torch.Tensor | slice
"""Rows: a list of them, or a run."""


class Residual:
    """Values that wait. They are 0 at first."""

    def __init__(self, rows: int, width: int, dtype: torch.dtype) -> None:
        self._values = torch.zeros(rows, width, dtype=dtype)

    def plus(self, rows: Which, values: torch.Tensor) -> torch.Tensor:
        """What waits of these rows, and `values`: a new tensor. It still waits."""
        return self._values[rows] + values

    def replace(self, rows: Which, values: torch.Tensor) -> None:
        """From now on this waits of these rows."""
        self._values[rows] = values

    def take(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The rows of which anything waits, and what. Then nothing does."""
        rows, values = self._waiting()
        self._values[rows] = 0
        return rows, values

    def state_dict(self) -> dict[str, Any]:
        rows, values = self._waiting()
        return {"rows": rows, "values": values}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._values.zero_()
        self._values[state["rows"]] = state["values"]

    def _waiting(self) -> tuple[torch.Tensor, torch.Tensor]:
        rows = self._values.ne(0).any(dim=1).nonzero().view(-1)
        return rows, self._values[rows]
