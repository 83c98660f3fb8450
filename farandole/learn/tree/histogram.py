"""How the targets are distributed over the bins of every column, in each open node: a sum.

The last axis of a histogram is the number of rows, and then
of a classification, the weight of each class;
of a regression, the sums of the weights, of the targets and of their squares.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from farandole.learn.linear.moments import Array
from farandole.learn.sources.chunk import Chunk
from farandole.learn.sums.sum import Statistics, Sum, as_statistics
from farandole.learn.tree.bins import Bins
from farandole.learn.tree.tree import Places, Routes


@dataclass(frozen=True)
class Frontier:
    """The nodes that this pass looks at: `slots` has a place for each, and −1 for all others."""

    routes: Routes
    slots: Places
    size: int


@dataclass(frozen=True)
class HistogramSum(Sum):
    """`classes` is 0 for a regression."""

    bins: Bins
    classes: int

    @property
    def depth(self) -> int:
        return 1 + (self.classes or 3)

    def map(self, chunk: Chunk, state: Frontier) -> Statistics:
        assert chunk.y is not None
        slots = state.slots[state.routes.apply(chunk.dense)]
        # A row without weight is no row, as in scikit-learn.
        rows = (slots >= 0) & (chunk.weight > 0)
        X, y, weight, slots = chunk.dense[rows], chunk.y[rows], chunk.weight[rows], slots[rows]
        bins, columns = self.bins.most, X.shape[1]
        found = np.zeros((state.size, columns, bins, self.depth))
        for column in range(columns):
            places = slots * bins + self.bins.of(column, X[:, column])
            for at, values in self._histograms(places, y, weight, state.size * bins):
                found[:, column, :, at] = values.reshape(state.size, bins, *values.shape[1:])
        return as_statistics(histogram=found)

    def _histograms(
        self, places: Places, y: Array, weight: Array, size: int
    ) -> list[tuple[slice | int, npt.NDArray[Any]]]:
        counts = np.bincount(places, minlength=size)
        if self.classes:
            both = places * self.classes + y
            classes = np.bincount(both, weight, size * self.classes)
            return [(0, counts), (slice(1, None), classes.reshape(size, self.classes))]
        weighted = weight * y
        sums = (weight, weighted, weighted * y)
        return [
            (0, counts),
            *((1 + at, np.bincount(places, values, size)) for at, values in enumerate(sums)),
        ]

    def finish(self, statistics: Statistics, state: Frontier) -> Array:
        found: Array = statistics["histogram"]
        return found
