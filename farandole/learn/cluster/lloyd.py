"""The passes of k-means, as sums. The state are the centres, clusters × columns."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from farandole.learn.cluster.nearest import Labels, NearestCentres
from farandole.learn.linear.moments import Array
from farandole.learn.sources.chunk import Chunk
from farandole.learn.sums.sum import Statistics, Sum, as_statistics


class _CentresSum(Sum):
    """A pass whose state are centres."""

    in_blocks = True

    def __init__(self) -> None:
        self._nearest: NearestCentres | None = None

    def nearest(self, centres: Array) -> NearestCentres:
        """Made once for the centres of a pass; two threads may both make it."""
        found = self._nearest
        if found is None or found.centres is not centres:
            found = self._nearest = NearestCentres(centres)
        return found

    def squares(self, chunk: Chunk, centres: Array) -> tuple[Labels, Array]:
        """The nearest centre of each row, and the squared distance from it."""
        nearest = self.nearest(centres)
        labels = nearest.of(chunk)
        return labels, nearest.squares(chunk, labels)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_nearest": None}  # of the last pass


class LloydSum(_CentresSum):
    """The weights and sums of the rows that are nearest to each centre.

    Sums of the rows less their centre: near the end these are small, and lose no digits.
    """

    def map(self, chunk: Chunk, state: Array) -> Statistics:
        counts, sums = self.nearest(state).sums(chunk)
        return as_statistics(counts=counts, shifts=sums - counts[:, None] * state)

    def finish(self, statistics: Statistics, state: Array) -> Statistics:
        return statistics


class FarthestSum(_CentresSum):
    """The row that is farthest from the nearest centre, and its squared distance."""

    def map(self, chunk: Chunk, state: Array) -> Statistics:
        least = self.squares(chunk, state)[1]
        farthest = int(least.argmax())
        row = chunk.X[[farthest]]
        dense = np.asarray(row.toarray() if hasattr(row, "toarray") else row)[0]
        return as_statistics(distance=least[farthest], row=dense)

    def merge(self, left: Statistics, right: Statistics) -> Statistics:
        return right if right["distance"] > left["distance"] else left

    def finish(self, statistics: Statistics, state: Array) -> Statistics:
        return statistics


class LabelSum(_CentresSum):
    """The nearest centre of each row, and the summed squared distance. As many labels as rows
    travel, which is less than reading the rows once more here."""

    def map(self, chunk: Chunk, state: Array) -> Statistics:
        nearest, least = self.squares(chunk, state)
        cost = (chunk.weight * least).sum()
        return as_statistics(cost=cost, labels=nearest.astype(np.int32))

    def merge(self, left: Statistics, right: Statistics) -> Statistics:
        labels = np.concatenate([left["labels"], right["labels"]])
        return {"cost": left["cost"] + right["cost"], "labels": labels}

    def finish(self, statistics: Statistics, state: Array) -> Statistics:
        return statistics


class CostSum(_CentresSum):
    """The summed squared distance of all rows from the nearest centre."""

    def map(self, chunk: Chunk, state: Array) -> Statistics:
        least = self.squares(chunk, state)[1]
        return as_statistics(cost=(chunk.weight * least).sum())

    def finish(self, statistics: Statistics, state: Array) -> float:
        return float(statistics["cost"])


class OversampleSum(_CentresSum):
    """Rows drawn by their squared distance from the nearest centre (k-means‖).

    Each chunk draws with a generator of its own, so what is drawn does not depend on who draws.
    """

    in_blocks = False

    def __init__(self, seed: int, turn: int, cost: float, wanted: float) -> None:
        super().__init__()
        self.seed, self.turn, self.cost, self.wanted = seed, turn, cost, wanted

    def map(self, chunk: Chunk, state: Array) -> Statistics:
        least = self.squares(chunk, state)[1] * chunk.weight
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
