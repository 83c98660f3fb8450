"""Skips rows at random; what is skipped goes with the row's next push.

The simplest way to send less. Each row is sent as often as any other, only more rarely.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from farandole.comm.codecs.shared_random import shared_random
from farandole.server.filters.filter import Filter, Sieve, require_share
from farandole.server.filters.residual_sieve import ResidualSieve


@dataclass(frozen=True)
class Skip(Filter):
    """Each row of each push stays behind with this probability."""

    name: ClassVar[str] = "skip"

    probability: float = 0.5
    seed: int = 0

    def __post_init__(self) -> None:
        require_share(self, "probability")

    def build(self, rows: int, width: int, dtype: torch.dtype, stream: str = "") -> Sieve:
        return _SkipSieve(self, rows, width, dtype, stream)


class _SkipSieve(ResidualSieve):
    def __init__(
        self, filter_: Skip, rows: int, width: int, dtype: torch.dtype, stream: str
    ) -> None:
        super().__init__(filter_, rows, width, dtype)
        self._probability = filter_.probability
        self._names = (filter_.seed, stream)
        self._pushes = 0

    def _are_sent(self, gathered: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        drawn = shared_random(*self._names, self._pushes).random(len(gathered))
        self._pushes += 1
        return torch.from_numpy(drawn >= self._probability)

    def state_dict(self) -> dict[str, Any]:
        return {"pushes": self._pushes, **super().state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._pushes = int(state["pushes"])
        super().load_state_dict(state)
