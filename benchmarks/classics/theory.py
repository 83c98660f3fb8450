"""The error bound of local SGD (Wang and Joshi, 2019), fitted to measured losses.

After T seconds with period τ, where a step computes for Y seconds and a meeting takes D:

    error(T, τ)  =  A/T · (Y + D/τ)  +  B  +  C·(τ − 1)

A = 2(F₁ − F_inf)/η, B = ηLσ²/m, C = η²L²σ². The first term is A over the number of steps, so a
period that changes with time is covered too: its number of steps, and the floor of its last period.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
from scipy.optimize import nnls


@dataclass(frozen=True)
class Bound:
    """Seconds of a step and of a meeting, and the three constants. A is per step."""

    compute: float
    meeting: float
    a: float
    b: float
    c: float

    def step(self, period: float) -> float:
        return self.compute + self.meeting / period

    def error(self, seconds: float, period: float) -> float:
        return self.a * self.step(period) / seconds + self.b + self.c * (period - 1)

    def best_period(self, seconds: float) -> float:
        """√(A·D / (C·T)): long at first, and then shorter; without drift the longest is best."""
        if self.c == 0:
            return float("inf")
        return max(1.0, float(np.sqrt(self.a * self.meeting / (self.c * seconds))))

    def best_fixed(self, seconds: float, longest: int) -> float:
        """The error of the best of all fixed periods up to `longest`."""
        return min(self.error(seconds, period) for period in range(1, longest + 1))

    def ideal(self, seconds: float, longest: int, moments: int = 400) -> float:
        """The error of a period that is `best_period` at every moment."""
        times = (np.arange(moments) + 0.5) * seconds / moments
        periods = [min(longest, self.best_period(at)) for at in times]
        steps = sum(seconds / moments / self.step(period) for period in periods)
        last = min(longest, self.best_period(seconds))
        return self.a / steps + self.b + self.c * (last - 1)

    def with_meeting(self, times: float) -> Bound:
        """Over a link on which a meeting takes so many times as long as the computing of a step."""
        return replace(self, meeting=times * self.compute)

    def adaptive(self, seconds: float, decisions: Sequence[tuple[float, float]]) -> float:
        """`decisions`: from when on which period. The error with the steps that were taken."""
        times = [at for at, _ in decisions if at < seconds] + [seconds]
        periods = [period for at, period in decisions if at < seconds]
        steps = sum(
            (end - begin) / self.step(period)
            for (begin, end), period in zip(pairwise(times), periods, strict=True)
        )
        return self.a / steps + self.b + self.c * (periods[-1] - 1)


def step_times(seconds_per_step: Mapping[int, float]) -> tuple[float, float]:
    """Y and D by least squares from what a step took under each fixed period."""
    matrix = np.array([[1.0, 1.0 / period] for period in seconds_per_step])
    found, _ = nnls(matrix, np.array(list(seconds_per_step.values())))
    return float(found[0]), float(found[1])


def fit(runs: Mapping[int, Sequence[Mapping[str, Any]]], after: float) -> Bound:
    """Of the training loss of all runs under fixed periods, from `after` seconds on.

    Short runs count from a third of the shortest on.
    """
    per_step = {
        period: float(np.mean([run["seconds"] / run["steps"] for run in found]))
        for period, found in runs.items()
    }
    compute, meeting = step_times(per_step)
    rows, losses = [], []
    shortest = min(run["seconds"] for found in runs.values() for run in found)
    begin = min(after, shortest / 3)
    for period, found in runs.items():
        for point in (point for run in found for point in run["points"]):
            loss = float(point["loss"])
            if point["seconds"] >= begin and math.isfinite(loss):
                rows.append([per_step[period] / point["seconds"], 1.0, period - 1.0])
                losses.append(loss)
    (a, b, c), _ = nnls(np.array(rows), np.array(losses))
    return Bound(compute, meeting, float(a), float(b), float(c))
