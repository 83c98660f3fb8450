"""Counts, means and centred products of all columns in one pass, stable by Chan's merges.

Sums of squares lose all digits where the mean is large. So each block of rows is centred by its own
mean, and two parts merge as: with d the difference of their means and m, n their weights,

    products = left + right + d dᵀ · m n / (m + n)

Without weights, the mean is taken off the products instead of the rows, n · mean meanᵀ in all: that
is a third faster. It costs no more than two digits where no mean is above ten standard deviations.
Columns for which it is are moved by their first value before.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from farandole.learn.sources.chunk import Chunk
from farandole.learn.sums.sum import Statistics, Sum, as_statistics

Array = npt.NDArray[np.float64]
_SAMPLE = 64  # rows to see by which columns are far from zero
_FAR = 100.0  # squared mean over variance


@dataclass(frozen=True)
class Moments:
    """Of the columns of X and then those of y."""

    weight: float
    rows: int
    mean: Array
    products: Array  # weighted, of the columns less their means

    def about_zero(self) -> Array:
        """The products of the columns themselves."""
        return self.products + self.weight * np.outer(self.mean, self.mean)


class MomentSum(Sum):
    """`with_targets`: also of y, which has one or more columns."""

    in_blocks = True

    def __init__(self, *, with_targets: bool = False) -> None:
        self.with_targets = with_targets

    def map(self, chunk: Chunk, state: Any) -> Statistics:
        X = chunk.dense
        if self.with_targets:
            assert chunk.y is not None
            y = np.asarray(chunk.y, dtype=np.float64).reshape(chunk.rows, -1)
            X = np.hstack([X, y])
        if chunk.weights is None:
            total = float(chunk.rows)
            mean, products = _centred_products(X)
        else:
            total = float(chunk.weights.sum())
            mean = chunk.weights @ X / total if total > 0 else np.zeros(X.shape[1])
            centred = X - mean
            products = (centred * chunk.weights[:, None]).T @ centred
        return as_statistics(weight=total, rows=chunk.rows, mean=mean, products=products)

    def merge(self, left: Statistics, right: Statistics) -> Statistics:
        m, n = float(left["weight"]), float(right["weight"])
        rows = left["rows"] + right["rows"]
        if m + n <= 0:
            return {**left, "rows": rows}
        difference = right["mean"] - left["mean"]
        products = left["products"] + right["products"]
        products = products + np.outer(difference, difference) * (m * n / (m + n))
        mean = left["mean"] + difference * (n / (m + n))
        return as_statistics(weight=m + n, rows=rows, mean=mean, products=products)

    def finish(self, statistics: Statistics, state: Any) -> Moments:
        weight, rows = float(statistics["weight"]), int(statistics["rows"])
        return Moments(weight, rows, statistics["mean"], statistics["products"])


def _centred_products(X: Array) -> tuple[Array, Array]:
    """The means of the columns, and the products of the columns less their means."""
    sample = X[:_SAMPLE]
    far = sample.mean(axis=0) ** 2 > _FAR / 4 * sample.var(axis=0)
    shift = np.where(far, X[0], 0.0)
    if far.any():
        X = X - shift
    rows = len(X)
    mean = np.ones(rows) @ X / rows
    products: Array = X.T @ X
    squares = rows * mean**2
    if (squares <= _FAR * np.maximum(products.diagonal() - squares, 0.0)).all():
        return mean + shift, products - np.outer(rows * mean, mean)
    centred = X - mean  # the first rows were not like the others
    return mean + shift, centred.T @ centred
