"""How mixed the targets of a node are, from what its histograms hold."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from scipy.special import xlogy

from farandole.learn.linear.moments import Array

Impurity = Callable[[Array], Array]  # of the last axis without its number of rows


def _shares(classes: Array) -> Array:
    total = classes.sum(axis=-1, keepdims=True)
    found: Array = np.divide(classes, total, out=np.zeros_like(classes), where=total > 0)
    return found


def gini(classes: Array) -> Array:
    found: Array = 1 - (_shares(classes) ** 2).sum(axis=-1)
    return found


def entropy(classes: Array) -> Array:
    """In bits."""
    shares = _shares(classes)
    found: Array = -xlogy(shares, shares).sum(axis=-1) / np.log(2)
    return np.maximum(found, 0.0)


def variance(sums: Array) -> Array:
    weight = np.maximum(sums[..., 0], np.finfo(float).tiny)
    square, mean = sums[..., 2] / weight, sums[..., 1] / weight
    found: Array = square - mean**2
    # What is below the rounding of the squares is not there.
    return np.where(found > 1e-13 * square, found, 0.0)


def weight_of(sums: Array, impurity: Impurity) -> Array:
    found: Array = sums[..., 0] if impurity is variance else sums.sum(axis=-1)
    return found


CLASSIFICATION: dict[str, Impurity] = {"gini": gini, "entropy": entropy, "log_loss": entropy}
REGRESSION: dict[str, Impurity] = {"squared_error": variance}
