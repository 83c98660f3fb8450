"""The loss of multinomial logistic regression, its gradient and its curvature, as a sum.

The state are the weights, (columns + 1) × classes; the last row are the intercepts.
"""

from __future__ import annotations

import numpy as np
from scipy.special import logsumexp

from farandole.learn.linear.moments import Array
from farandole.learn.sources.chunk import Chunk
from farandole.learn.sums.sum import Statistics, Sum, as_statistics


class SoftmaxSum(Sum):
    """`curvature`: also the second derivatives, which take (columns × classes)² numbers."""

    def __init__(self, classes: int, *, intercept: bool, curvature: bool) -> None:
        self.classes = classes
        self.intercept = intercept
        self.curvature = curvature

    def map(self, chunk: Chunk, state: Array) -> Statistics:
        assert chunk.y is not None
        weight = chunk.weight
        scores = chunk.X @ state[:-1] + state[-1]
        logs = scores - logsumexp(scores, axis=1, keepdims=True)
        rows = np.arange(chunk.rows)
        loss = -(weight * logs[rows, chunk.y]).sum()
        chances = np.exp(logs)
        slope = chances * weight[:, None]
        slope[rows, chunk.y] -= weight
        last = slope.sum(axis=0) if self.intercept else np.zeros(self.classes)
        found = as_statistics(
            loss=loss, gradient=np.vstack([chunk.X.T @ slope, last]), weight=weight.sum()
        )
        if not self.curvature:
            return found
        return {**found, "curvature": self._curvature(chunk, chances, weight)}

    def _curvature(self, chunk: Chunk, chances: Array, weight: Array) -> Array:
        ones = np.ones((chunk.rows, 1)) if self.intercept else np.zeros((chunk.rows, 1))
        X = np.hstack([chunk.dense, ones])
        size, classes = X.shape[1], self.classes
        found = np.empty((size, classes, size, classes))
        for a in range(classes):
            for b in range(a, classes):
                inner = weight * chances[:, a] * ((a == b) - chances[:, b])
                found[:, a, :, b] = found[:, b, :, a] = X.T @ (X * inner[:, None])
        return found

    def finish(self, statistics: Statistics, state: Array) -> Statistics:
        return statistics
