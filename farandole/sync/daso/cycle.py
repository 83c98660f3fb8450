"""DASO's clockwork: which phase the run is in, and how far apart and how late hosts exchange.

    warm-up      │ cycling                                              │ cool-down
    synchronous  │ every B steps an exchange, merged S steps later      │ synchronous
                 │ B = 4 ──plateau──▶ 2 ──plateau──▶ 1 ──plateau──▶ 8 ▶ │

A plateau: the epochs' loss has not become 5 % better for 3 epochs. No torch here, and no ranks: all
of them turn the same clockwork with the same losses.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Phase = Literal["warm-up", "cycling", "cool-down"]


@dataclass(frozen=True)
class CycleRule:
    every: int  # B at first
    longest: int  # B after a plateau at 1
    wait: int | None  # S; None: a quarter of B, but at least 1
    warmup: float  # shares of the run
    cooldown: float
    patience: int
    improvement: float


class Cycle:
    def __init__(self, rule: CycleRule) -> None:
        self._rule = rule
        self.period = rule.every
        self._best = math.inf
        self._epochs_without = 0

    @property
    def wait(self) -> int:
        return self._rule.wait if self._rule.wait is not None else max(1, self.period // 4)

    def phase(self, progress: float | None, passes: int) -> Phase:
        """At this share of the run; where nobody knows how long it is, the first pass warms up."""
        if progress is None:
            return "warm-up" if self._rule.warmup > 0 and passes <= 1 else "cycling"
        if progress < self._rule.warmup:
            return "warm-up"
        return "cool-down" if progress >= 1 - self._rule.cooldown else "cycling"

    def epoch(self, loss: float) -> str | None:
        """An epoch of cycling ended with this loss; returns why the period changes, if it does."""
        rule = self._rule
        if loss < self._best * (1 - rule.improvement):
            self._best, self._epochs_without = loss, 0
            return None
        self._epochs_without += 1
        if self._epochs_without < rule.patience:
            return None
        self._epochs_without = 0
        self.period = rule.longest if self.period == 1 else self.period // 2
        return f"not {rule.improvement:.0%} better than {self._best:.4g} in {rule.patience} epochs"

    def state_dict(self) -> dict[str, Any]:
        return {
            "period": self.period,
            "best": self._best,
            "epochs_without": self._epochs_without,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.period, self._best = state["period"], state["best"]
        self._epochs_without = state["epochs_without"]
