"""Axes of the plots: from a value to a place between 0 and 1."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from farandole.report import units


@dataclass(frozen=True)
class Axis:
    """`ticks` are places with their texts. `options` are those of a choice from a list."""

    name: str
    low: float
    high: float
    log: bool = False
    options: tuple[str, ...] = ()

    @classmethod
    def of_choice(cls, name: str, space: Mapping[str, Any]) -> Axis:
        if "options" in space:
            options = tuple(map(str, space["options"]))
            return cls(name, 0.0, max(1.0, len(options) - 1.0), options=options)
        return cls(name, float(space["low"]), float(space["high"]), bool(space.get("log")))

    @classmethod
    def of_values(cls, name: str, values: Sequence[float]) -> Axis:
        """As wide as the values, and never without any width."""
        found = [value for value in values if math.isfinite(value)] or [0.0]
        low, high = min(found), max(found)
        margin = (high - low) * 0.05 or max(abs(high), 1.0) * 0.05
        return cls(name, low - margin, high + margin)

    def place(self, value: Any) -> float:
        number = float(self.options.index(str(value)) if self.options else value)
        low, high = self.low, self.high
        if self.log:
            number, low, high = math.log(number), math.log(low), math.log(high)
        return min(1.0, max(0.0, (number - low) / (high - low)))

    def ticks(self) -> list[tuple[float, str]]:
        if self.options:
            return [(self.place(option), option) for option in self.options]
        middle = math.sqrt(self.low * self.high) if self.log else (self.low + self.high) / 2
        return [(self.place(v), units.number(v)) for v in (self.low, middle, self.high)]
