"""The passes of k-means, as sums. The state are the centres, clusters × columns."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from farandole.learn.linear.moments import Array
from farandole.learn.sources.chunk import Chunk
from farandole.learn.sums.sum import Statistics, Sum, as_statistics


def squared_distances(X: Any, centres: Array) -> Array:
    """Of each row from each centre, up to rounding not below 0."""
    squares = X.multiply(X).sum(axis=1) if hasattr(X, "multiply") else np.einsum("ij,ij->i", X, X)
    squares = np.asarray(squares).reshape(-1, 1)
    found = np.asarray(X @ centres.T)
    found *= -2.0
    found += squares
    found += np.einsum("ij,ij->i", centres, centres)
    distances: Array = np.maximum(found, 0.0, out=found)
    return distances


class LloydSum(Sum):
    """The weights, sums and squared distances of the rows that are nearest to each centre.

    Sums of the rows less their centre: near the end these are small, and lose no digits.
    """

    def map(self, chunk: Chunk, state: Array) -> Statistics:
        distances = squared_distances(chunk.X, state)
        nearest = distances.argmin(axis=1)
        weight = chunk.weight
        clusters = len(state)
        counts = np.bincount(nearest, weight, clusters)
        members = np.zeros((clusters, chunk.rows))
        members[nearest, np.arange(chunk.rows)] = weight
        shifts = np.asarray(members @ chunk.X) - counts[:, None] * state
        least = distances[np.arange(chunk.rows), nearest]
        farthest = int(least.argmax())
        row = chunk.X[[farthest]]
        return as_statistics(
            counts=counts,
            shifts=shifts,
            inertia=(weight * least).sum(),
            far_distance=least[farthest],
            far_row=np.asarray(row.toarray() if hasattr(row, "toarray") else row)[0],
        )

    def merge(self, left: Statistics, right: Statistics) -> Statistics:
        farther = right if right["far_distance"] > left["far_distance"] else left
        summed = {name: left[name] + right[name] for name in ("counts", "shifts", "inertia")}
        return {**summed, **{name: farther[name] for name in ("far_distance", "far_row")}}

    def finish(self, statistics: Statistics, state: Array) -> Statistics:
        return statistics


class CostSum(Sum):
    """The summed squared distance of all rows from the nearest centre, and the weight."""

    def map(self, chunk: Chunk, state: Array) -> Statistics:
        least = squared_distances(chunk.X, state).min(axis=1)
        return as_statistics(cost=(chunk.weight * least).sum())

    def finish(self, statistics: Statistics, state: Array) -> float:
        return float(statistics["cost"])


class OversampleSum(Sum):
    """Rows drawn by their squared distance from the nearest centre (k-means‖).

    Each chunk draws with a generator of its own, so what is drawn does not depend on who draws.
    """

    def __init__(self, seed: int, turn: int, cost: float, wanted: float) -> None:
        self.seed, self.turn, self.cost, self.wanted = seed, turn, cost, wanted

    def map(self, chunk: Chunk, state: Array) -> Statistics:
        least = squared_distances(chunk.X, state).min(axis=1) * chunk.weight
        generator = np.random.default_rng([self.seed, self.turn, chunk.number])
        drawn = generator.random(chunk.rows) * self.cost < self.wanted * least
        rows = chunk.X[drawn]
        return as_statistics(rows=rows.toarray() if hasattr(rows, "toarray") else rows)

    def merge(self, left: Statistics, right: Statistics) -> Statistics:
        return {"rows": np.concatenate([left["rows"], right["rows"]])}

    def finish(self, statistics: Statistics, state: Array) -> Array:
        rows: npt.NDArray[np.float64] = statistics["rows"]
        return rows


class OneRowSum(Sum):
    """One row drawn by weight: each gets a key, and the largest wins."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def map(self, chunk: Chunk, state: Any) -> Statistics:
        generator = np.random.default_rng([self.seed, chunk.number])
        weight = chunk.weight
        keys = np.full(chunk.rows, -np.inf)
        np.divide(np.log(generator.random(chunk.rows)), weight, out=keys, where=weight > 0)
        best = int(keys.argmax())
        row = chunk.X[[best]]
        dense = np.asarray(row.toarray() if hasattr(row, "toarray") else row)[0]
        return as_statistics(key=keys[best], row=dense)

    def merge(self, left: Statistics, right: Statistics) -> Statistics:
        return right if right["key"] > left["key"] else left

    def finish(self, statistics: Statistics, state: Any) -> Array:
        row: Array = statistics["row"]
        return row
