"""The loss of logistic regression, its gradient and its curvature, as a sum.

The state are the weights, (columns + 1) × classes, or × 1 for two classes; the last row are the
intercepts.
"""

from __future__ import annotations

import numpy as np
from scipy.special import logsumexp

from farandole.learn.linear.moments import Array
from farandole.learn.sources.chunk import Chunk
from farandole.learn.sums.sum import Statistics, Sum, as_statistics


class SigmoidSum(Sum):
    """Of two classes: y is 0 or 1, and the score is that of 1. `curvature`: also the second
    derivatives, (columns + 1)² numbers."""

    in_blocks = True

    def __init__(self, *, intercept: bool, curvature: bool) -> None:
        self.intercept = intercept
        self.curvature = curvature

    def map(self, chunk: Chunk, state: Array) -> Statistics:
        assert chunk.y is not None
        scores = chunk.X @ state[:-1, 0] + state[-1, 0]
        small = np.exp(-np.abs(scores))  # never overflows
        losses = np.log1p(small) + np.maximum(scores, 0.0) - chunk.y * scores
        slope = np.where(scores >= 0, 1.0, small) / (1.0 + small) - chunk.y
        second = small / (1.0 + small) ** 2 if self.curvature else None
        if chunk.weights is not None:
            losses, slope = losses * chunk.weights, slope * chunk.weights
            second = None if second is None else second * chunk.weights
        gradient = np.append(slope @ chunk.X, slope.sum() if self.intercept else 0.0)
        found = as_statistics(
            loss=losses.sum(), gradient=gradient[:, None], weight=chunk.weight.sum()
        )
        if second is None:
            return found
        return {**found, "curvature": self._curvature(chunk, np.sqrt(second))}

    def _curvature(self, chunk: Chunk, roots: Array) -> Array:
        """`roots` of the second derivatives: a product with its own transpose is half the work."""
        scaled = np.empty((chunk.rows, chunk.X.shape[1] + 1))
        np.multiply(chunk.dense, roots[:, None], out=scaled[:, :-1])
        scaled[:, -1] = roots if self.intercept else 0.0
        found: Array = scaled.T @ scaled
        return found

    def finish(self, statistics: Statistics, state: Array) -> Statistics:
        return statistics


class SoftmaxSum(Sum):
    """Of more. `curvature`: also the second derivatives, which take (columns × classes)²."""

    in_blocks = True

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
