"""The leading right singular vectors of X, or of X less its column means, by subspace iteration.

Randomised SVD (Halko, Martinsson and Tropp 2011) multiplies by X and by Xᵀ in turns. Here each turn
is one sum, of columns × width: only products of the columns with a few directions Q travel.

    Z ← Xᵀ (X Q)          one pass
    Q ← orthonormal columns of Z

At the end the eigenvectors of Qᵀ Z, in the basis Q, are the directions. If there are no more
columns than directions asked for with their oversampling, Q is the identity, and the result exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from scipy import linalg

from farandole.learn.linear.moments import Array
from farandole.learn.pools.base import Placed
from farandole.learn.sources.chunk import Chunk
from farandole.learn.sums.sum import Statistics, Sum, as_statistics


class Directions(NamedTuple):
    """`squares`: of the singular values, in falling order."""

    vectors: Array  # directions × columns
    squares: Array


@dataclass(frozen=True)
class ProductSum(Sum):
    """Xᵀ X Q for the state Q, with X less `mean`. Sparse rows stay sparse."""

    mean: Array | None

    def map(self, chunk: Chunk, state: Array) -> Statistics:
        along = np.asarray(chunk.X @ state)
        if self.mean is None:
            return as_statistics(products=np.asarray(chunk.X.T @ along))
        along = along - self.mean @ state
        products = np.asarray(chunk.X.T @ along) - np.outer(self.mean, along.sum(axis=0))
        return as_statistics(products=products)

    def finish(self, statistics: Statistics, state: Array) -> Array:
        found: Array = statistics["products"]
        return found


def leading_directions(
    placed: Placed, wanted: int, mean: Array | None, seed: int, oversampling: int, iterations: int
) -> Directions:
    """In `iterations` + 1 passes, or in one if it is exact."""
    columns = placed.source.columns
    width = min(columns, wanted + oversampling)
    job = ProductSum(mean)
    if width == columns:
        basis = np.eye(columns)
        iterations = 0
    else:
        drawn = np.random.default_rng(seed).normal(size=(columns, width))
        basis = linalg.qr(drawn, mode="economic")[0]
    for _ in range(iterations):
        basis = linalg.qr(placed.sum(job, basis), mode="economic")[0]
    small = basis.T @ placed.sum(job, basis)
    values, vectors = linalg.eigh((small + small.T) / 2)
    found = (basis @ vectors[:, ::-1]).T[:wanted]
    return Directions(with_signs(found), np.clip(values[::-1][:wanted], 0.0, None))


def with_signs(vectors: Array) -> Array:
    """The sign of a direction is free: as in scikit-learn, its largest part is positive."""
    largest = vectors[np.arange(len(vectors)), np.abs(vectors).argmax(axis=1)]
    return np.ascontiguousarray(vectors * np.where(largest < 0, -1.0, 1.0)[:, None])
