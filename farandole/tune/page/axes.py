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
    has_bounds: bool = True  # that somebody has chosen; else its ticks are round numbers

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
        return cls(name, low - margin, high + margin, has_bounds=False)

    def place(self, value: Any) -> float:
        number = float(self.options.index(str(value)) if self.options else value)
        low, high = self.low, self.high
        if self.log:
            number, low, high = math.log(number), math.log(low), math.log(high)
        return min(1.0, max(0.0, (number - low) / (high - low)))

    def ticks(self) -> list[tuple[float, str]]:
        if self.options:
            return [(self.place(option), option) for option in self.options]
        if not self.has_bounds:
            return [(self.place(v), units.number(v)) for v in _round_values(self.low, self.high)]
        middle = math.sqrt(self.low * self.high) if self.log else (self.low + self.high) / 2
        return [(self.place(v), units.number(v)) for v in (self.low, middle, self.high)]


def _round_values(low: float, high: float) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten: from 2 to 6 of them."""
    rough = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
    first, last = math.ceil(low / step), math.floor(high / step)
    return [float(f"{number * step:.12g}") for number in range(first, last + 1)]
