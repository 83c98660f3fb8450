"""The loss of all rows and its gradient: one sum over chunks."""

from __future__ import annotations

from typing import Any

import numpy as np

from farandole.learn.lbfgs.model_loss import ModelLoss
from farandole.learn.lbfgs.vectors import Vector
from farandole.learn.sources.chunk import Chunk
from farandole.learn.sources.source import Source
from farandole.learn.sums.sum import Statistics, Sum, as_statistics


class ModelSource(Source):
    """Rows of any shape and dtype, as they are."""

    def read(self, number: int) -> Chunk:
        rows = self.rows_of(number, number + 1)
        first = number * self.chunk_rows
        X = np.asarray(self.X[rows])
        if X.dtype.kind == "f":
            self.require_finite(X, first, number)
        y = None if self.y is None else np.asarray(self.y[rows])
        return Chunk(X, y, None, first, number)


class GradientSum(Sum):
    """State: the vector of parameters."""

    def __init__(self, function: ModelLoss) -> None:
        self._function = function

    def map(self, chunk: Chunk, state: Vector) -> Statistics:
        loss, gradient = self._function.at(state, chunk.given, chunk.y)
        return as_statistics(loss=loss * chunk.rows, gradient=gradient * chunk.rows)

    def finish(self, statistics: Statistics, state: Any) -> tuple[float, Vector]:
        """The sum of the losses of all rows, and its gradient."""
        return float(statistics["loss"]), statistics["gradient"]
