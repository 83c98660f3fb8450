"""Minimises ½ wᵀ G w − bᵀ w + a ‖w‖₁ + ½ c ‖w‖², one coefficient at a time.

G are the products of the columns, so a step costs one of its rows, and no pass over the data. After
a sweep over all coefficients only those that are not zero are swept until they rest; then all
again.
At the optimum the gradient g = b − G w − c w satisfies, for each coefficient:

    w > 0: g = a        w < 0: g = −a        w = 0: |g| ≤ a
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from farandole.learn.linear.moments import Array


class Descent(NamedTuple):
    """`violation` is the largest, over all coefficients, of what is missing at the optimum."""

    coefficients: Array
    iterations: int
    violation: float


def descend(
    gram: Array, target: Array, l1: float, l2: float, tolerance: float, most: int
) -> Descent:
    """Stops when no condition is violated by more than `tolerance` of the largest |b|."""
    found = np.zeros(len(target))
    gradient = target.copy()  # b − G w; of the penalty nothing
    diagonal = np.diag(gram) + l2
    allowed = tolerance * float(np.abs(target).max(initial=0.0))
    everything = np.flatnonzero(diagonal > 0)  # a column that is zero has no say
    iterations = 0
    violation = _violation(found, gradient, l1, l2)
    while violation > allowed and iterations < most:
        _sweep(everything, found, gradient, gram, diagonal, l1)
        iterations += 1
        active = np.flatnonzero(found)
        while iterations < most:
            inner = _violation(found[active], gradient[active], l1, l2)
            if inner <= allowed / 2:
                break
            _sweep(active, found, gradient, gram, diagonal, l1)
            iterations += 1
        violation = _violation(found, gradient, l1, l2)
    return Descent(found, iterations, violation)


def _sweep(
    places: Iterable[int], found: Array, gradient: Array, gram: Array, diagonal: Array, l1: float
) -> None:
    for place in places:
        old = found[place]
        pull = gradient[place] + gram[place, place] * old
        new = np.sign(pull) * max(abs(pull) - l1, 0.0) / diagonal[place]
        if new != old:
            found[place] = new
            gradient += gram[place] * (old - new)


def _violation(found: Array, gradient: Array, l1: float, l2: float) -> float:
    slope = gradient - l2 * found
    wrong = np.where(
        found == 0, np.maximum(np.abs(slope) - l1, 0.0), np.abs(slope - l1 * np.sign(found))
    )
    return float(wrong.max(initial=0.0))
