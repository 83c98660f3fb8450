"""The squared hinge of linear classifiers, its gradient and its curvature, as a sum.

The state are the weights, (columns + 1) × classifiers; the last row are the intercepts, of a column
that is `scale` everywhere. Classifier k tells class k (+1) from all others (−1).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from farandole.learn.linear.moments import Array
from farandole.learn.sources.chunk import Chunk
from farandole.learn.sums.sum import Statistics, Sum, as_statistics


@dataclass(frozen=True)
class HingeSum(Sum):
    """With one classifier, class 1 is +1. `curvature`: classifiers × (columns + 1)² numbers."""

    classifiers: int
    scale: float  # 0 without an intercept
    curvature: bool

    def map(self, chunk: Chunk, state: Array) -> Statistics:
        assert chunk.y is not None
        weight = chunk.weight[:, None]
        signs = self._signs(chunk.y)
        scores = chunk.X @ state[:-1] + self.scale * state[-1]
        missing = np.maximum(1 - signs * scores, 0.0)  # to the margin
        slope = -2 * weight * signs * missing
        gradient = np.vstack([chunk.X.T @ slope, self.scale * slope.sum(axis=0)])
        found = as_statistics(
            loss=(weight * missing**2).sum(), gradient=gradient, weight=weight.sum()
        )
        if not self.curvature:
            return found
        X = np.hstack([chunk.dense, np.full((chunk.rows, 1), self.scale)])
        second = np.empty((self.classifiers, X.shape[1], X.shape[1]))
        for place in range(self.classifiers):
            inside = missing[:, place] > 0
            rows = X[inside]
            second[place] = 2 * (rows * weight[inside]).T @ rows
        return {**found, "curvature": second}

    def _signs(self, labels: npt.NDArray[np.int64]) -> Array:
        if self.classifiers == 1:
            return np.where(labels == 1, 1.0, -1.0)[:, None]
        return np.where(labels[:, None] == np.arange(self.classifiers), 1.0, -1.0)

    def finish(self, statistics: Statistics, state: Array) -> Statistics:
        return statistics
