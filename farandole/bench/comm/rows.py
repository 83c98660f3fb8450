"""What was measured: one row for each size and algorithm, beside the alternatives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Timing:
    """Seconds of one all-reduce: the median over repeats, and the quartiles."""

    median: float
    quartile_1: float
    quartile_3: float

    @classmethod
    def of(cls, ranks: Sequence[Sequence[float]]) -> Timing:
        """From every rank's times, one for each repeat: the slowest rank's count."""
        low, middle, high = np.quantile(np.max(ranks, axis=0), (0.25, 0.5, 0.75))
        return cls(float(middle), float(low), float(high))

    @property
    def spread(self) -> float:
        """The distance between the quartiles, as a share of the median."""
        return (self.quartile_3 - self.quartile_1) / self.median


@dataclass(frozen=True)
class Row:
    """One algorithm of ours at one size."""

    ranks: int
    bytes: int
    algorithm: str  # as asked for
    chosen: str  # what `auto` stood for
    transport: str
    time: Timing
    correct: bool
    against: Mapping[str, Timing]
    against_correct: Mapping[str, bool]

    @property
    def bus_bytes_per_second(self) -> float:
        """What each rank would send if a ring did it; comparable between numbers of ranks.

        For n bytes on p ranks in t seconds: 2(p-1)/p·n/t.
        """
        return 2 * (self.ranks - 1) / self.ranks * self.bytes / self.time.median

    @property
    def ratios(self) -> dict[str, float]:
        """How many times as long each alternative takes: above 1 we are faster."""
        return {name: timing.median / self.time.median for name, timing in self.against.items()}

    def record(self) -> dict[str, Any]:
        """As it stands in the JSON file."""
        return {
            "ranks": self.ranks,
            "bytes": self.bytes,
            "algorithm": self.algorithm,
            "transport": self.transport,
            "seconds": self.time.median,
            "against": {name: timing.median for name, timing in self.against.items()},
            "chosen": self.chosen,
            "correct": self.correct,
            "bus_bytes_per_second": self.bus_bytes_per_second,
            "ratio": self.ratios,
            "quartiles": [self.time.quartile_1, self.time.quartile_3],
            "against_quartiles": {
                name: [timing.quartile_1, timing.quartile_3]
                for name, timing in self.against.items()
            },
            "against_correct": dict(self.against_correct),
        }
