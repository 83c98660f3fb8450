"""Similarities by a few landmarks (Nyström's method), which make spectral clustering a sum.

The similarity of two rows is exp(−gamma ‖a − b‖²). The matrix A of all rows by all rows is not
formed: with C the similarities of rows to the landmarks and W those of the landmarks,

    A ≈ C W⁺ Cᵀ = F Fᵀ,   with F = C W^(−½), a few numbers for each row.

If every row is a landmark, this is A itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from scipy import linalg

from farandole.learn.cluster.nearest import squared_distances
from farandole.learn.linear.moments import Array
from farandole.learn.sources.chunk import Chunk
from farandole.learn.sums.sum import Statistics, Sum, as_statistics


@dataclass(frozen=True)
class DrawnRowsSum(Sum):
    """`count` rows, each with the same chance: each row gets a key, and the smallest win."""

    seed: int
    count: int

    def map(self, chunk: Chunk, state: Any) -> Statistics:
        keys = np.random.default_rng([self.seed, chunk.number]).random(chunk.rows)
        chosen = np.sort(np.argsort(keys, kind="stable")[: self.count])
        rows = chunk.X[chosen]
        return as_statistics(
            keys=keys[chosen], rows=rows.toarray() if hasattr(rows, "toarray") else rows
        )

    def merge(self, left: Statistics, right: Statistics) -> Statistics:
        keys = np.concatenate([left["keys"], right["keys"]])
        rows = np.concatenate([left["rows"], right["rows"]])
        chosen = np.sort(np.argsort(keys, kind="stable")[: self.count])
        return {"keys": keys[chosen], "rows": rows[chosen]}

    def finish(self, statistics: Statistics, state: Any) -> Array:
        found: Array = statistics["rows"]
        return found


class Landmarks(NamedTuple):
    """`root` is W^(−½), without the directions in which the landmarks hardly differ.

    Rows are taken less an `origin` among them: squares of numbers far from zero would lose the
    digits of the distances.
    """

    origin: Array
    rows: Array  # less the origin
    root: Array
    gamma: float

    def features(self, X: Any) -> Array:
        """F: of each row, so that products of rows are their similarities."""
        dense = X.toarray() if hasattr(X, "toarray") else X
        return similarities(dense - self.origin, self.rows, self.gamma) @ self.root


class Normalised(NamedTuple):
    """Features divided by the roots of the rows' degrees, which are sums of their similarities."""

    landmarks: Landmarks
    total: Array  # the features of all rows, summed
    least: float  # approximated similarities may be a little below zero, and so may their sums

    def features(self, X: Any) -> tuple[Array, Array]:
        """And the degrees of the rows."""
        found = self.landmarks.features(X)
        degrees = np.maximum(found @ self.total, self.least)
        return found / np.sqrt(degrees)[:, None], degrees


def similarities(X: Array, others: Array, gamma: float) -> Array:
    found: Array = np.exp(-gamma * squared_distances(X, others))
    return found


def as_landmarks(drawn: Array, origin: Array, gamma: float) -> Landmarks:
    rows = drawn - origin
    values, vectors = linalg.eigh(similarities(rows, rows, gamma))
    kept = values > values[-1] * len(values) * 10 * np.finfo(float).eps
    return Landmarks(origin, rows, vectors[:, kept] / np.sqrt(values[kept]), gamma)


class FeatureTotalSum(Sum):
    """The features of all rows, summed. The state are the landmarks."""

    def map(self, chunk: Chunk, state: Landmarks) -> Statistics:
        return as_statistics(total=state.features(chunk.X).sum(axis=0))

    def finish(self, statistics: Statistics, state: Landmarks) -> Normalised:
        return Normalised(state, statistics["total"], 1e-8)


class FeatureProductSum(Sum):
    """The products of the normalised features, whose leading eigenvectors are wanted."""

    def map(self, chunk: Chunk, state: Normalised) -> Statistics:
        features, _ = state.features(chunk.X)
        return as_statistics(products=features.T @ features)

    def finish(self, statistics: Statistics, state: Normalised) -> Array:
        found: Array = statistics["products"]
        return found
