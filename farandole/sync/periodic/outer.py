"""An optimizer around the averages: each round of local steps is one large step to it.

With x where all ranks began the round, x̄ the average of where they arrived, and Δ = x − x̄ as if it
were a gradient:

    v ← momentum·v + Δ
    x ← x − rate·v                       (block momentum)
    x ← x − rate·(Δ + momentum·v)        (Nesterov, as DiLoCo has it)

With rate 1 and momentum 0 that is x ← x̄: plain averaging.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class OuterRule:
    rate: float
    momentum: float
    nesterov: bool


def block_momentum(momentum: float) -> OuterRule | None:
    """Averages that gain speed; without momentum they are plain averages, and need no rule."""
    return OuterRule(1.0, momentum, nesterov=False) if momentum else None


class Outer:
    def __init__(self, rule: OuterRule) -> None:
        self._rule = rule
        self._velocity: list[torch.Tensor] | None = None

    def step(self, base: Sequence[torch.Tensor], average: Sequence[torch.Tensor]) -> None:
        """Moves `base`, in place, by what the ranks have learned since they were there."""
        rule = self._rule
        moves = [where - arrived for where, arrived in zip(base, average, strict=True)]
        if self._velocity is None or [v.shape for v in self._velocity] != [m.shape for m in moves]:
            self._velocity = [torch.zeros_like(move) for move in moves]
        pairs = zip(self._velocity, moves, strict=True)
        self._velocity = [velocity.to(move.device) for velocity, move in pairs]  # after a resume
        for where, move, velocity in zip(base, moves, self._velocity, strict=True):
            velocity.mul_(rule.momentum).add_(move)
            step = move.add_(velocity, alpha=rule.momentum) if rule.nesterov else velocity
            # `base` is the same bits on all ranks before and after: all have the same average, and
            # the same velocity, which nothing but averages has ever entered.
            where.sub_(step, alpha=rule.rate)

    def state_dict(self) -> dict[str, Any]:
        return {"velocity": self._velocity}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        velocity = state["velocity"]
        self._velocity = None if velocity is None else [v.clone() for v in velocity]
