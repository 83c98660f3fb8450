"""Locally weighted regression: for each row asked for, a line through the rows near it.

Rows count by exp(−d² / 2 bandwidth²) of their distance d. So there is nothing to fit beforehand: a
prediction is a sum over all rows, of their products for every row asked for. Weights are relative
to that of the nearest row, so that they do not vanish however far away all rows are.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
from scipy import linalg
from sklearn.base import RegressorMixin
from sklearn.utils.validation import check_is_fitted

from farandole.learn.estimators.base import SumEstimator
from farandole.learn.estimators.targets import one_target
from farandole.learn.linear.moments import Array, MomentSum
from farandole.learn.pools.choose import as_pool
from farandole.learn.sources.chunk import Chunk
from farandole.learn.sources.source import Source
from farandole.learn.statistics.columns import ColumnSum
from farandole.learn.sums.sum import Statistics, Sum, as_statistics

_BATCH_BYTES = 8 << 20  # of the products for all rows asked for in one pass


@dataclass(frozen=True)
class LocalMomentSum(Sum):
    """The moments of X and y about each row of the state, weighted by the distance from it."""

    bandwidth: float

    def map(self, chunk: Chunk, state: Array) -> Statistics:
        moments = MomentSum(with_targets=True)
        X, weight = chunk.dense, chunk.weight
        found = []
        for centre in state:
            # Not |a|² − 2 a b + |b|², which loses the digits of small distances.
            away = np.square((X - centre) / self.bandwidth).sum(axis=1) / 2
            away = np.where(weight > 0, away, np.inf)
            nearest = away.min()
            near = np.exp(-(away - nearest)) * weight if nearest < np.inf else 0 * weight
            part = moments.map(replace(chunk, weights=near), None)
            found.append({**part, "nearest": np.asarray(nearest)})
        return _stacked(found)

    def merge(self, left: Statistics, right: Statistics) -> Statistics:
        moments = MomentSum(with_targets=True)
        found = []
        for place in range(len(left["nearest"])):
            parts = [{name: side[name][place] for name in side} for side in (left, right)]
            nearest = min(part["nearest"] for part in parts)
            scaled = [_relative(part, nearest) for part in parts]
            found.append({**moments.merge(*scaled), "nearest": np.asarray(nearest)})
        return _stacked(found)

    def finish(self, statistics: Statistics, state: Array) -> Array:
        """The prediction for each row of the state."""
        columns = state.shape[1]
        mean, products = statistics["mean"], statistics["products"]
        found = np.empty(len(state))
        for place, centre in enumerate(state):
            # The line of least slope where the rows near by leave it open, such as a single one.
            slope = linalg.pinvh(products[place, :columns, :columns], rtol=1e-10)
            slope = slope @ products[place, :columns, columns]
            found[place] = mean[place, columns] + slope @ (centre - mean[place, :columns])
        return found


def _relative(part: Statistics, nearest: float) -> Statistics:
    factor = np.exp(-(part["nearest"] - nearest)) if part["nearest"] < np.inf else 0.0
    return {**part, "weight": part["weight"] * factor, "products": part["products"] * factor}


def _stacked(parts: list[dict[str, Any]]) -> Statistics:
    return as_statistics(**{name: np.stack([part[name] for part in parts]) for name in parts[0]})


class LocallyWeightedRegression(RegressorMixin, SumEstimator):
    """`bandwidth` is the distance, in the units of X, at which a row counts 0.61 of the nearest.

    `fit` keeps the data, and `predict` passes over all of it: once for every few rows asked for.
    """

    def __init__(self, bandwidth: float = 1.0, *, pool: Any = None, chunk_rows: int = 0) -> None:
        self.bandwidth = bandwidth
        self.pool = pool
        self.chunk_rows = chunk_rows

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Of X (rows × columns) and y."""
        if not 0 < self.bandwidth < np.inf:
            raise ValueError(f"bandwidth={self.bandwidth!r}: it is above 0, and finite.")
        targets = one_target(y, type(self).__name__)
        source = self._source(X, targets, sample_weight)
        with as_pool(self.pool).place(source) as placed:
            # All of the data is looked at now, and not in the first prediction.
            placed.sum(ColumnSum())
        self.source_ = source
        return self

    def predict(self, X: Any) -> Array:
        """Of each row."""
        check_is_fitted(self)
        job = LocalMomentSum(self.bandwidth)
        asked = Source(self._table(X, reset=False), chunk_rows=self.chunk_rows)
        batch = max(1, _BATCH_BYTES // (8 * (self.n_features_in_ + 2) ** 2))
        found = []
        with as_pool(self.pool).place(self.source_) as placed:
            for number in range(asked.chunks):
                rows = asked.read(number).dense
                for first in range(0, len(rows), batch):
                    found.append(placed.sum(job, rows[first : first + batch]))
        return np.concatenate(found)
