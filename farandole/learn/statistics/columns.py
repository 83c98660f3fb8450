"""Central moments and ranges of the columns, in one pass, stable by Chan's and Pébay's merges.

Each chunk is centred by its own means. With d the difference of the means of two parts, m and n
their weights and Mₖ their sums of k-th powers, the parts merge (Pébay 2008) as

    M₂ = M₂' + M₂'' + d² m n / (m + n)
    M₃ = M₃' + M₃'' + d³ m n (m − n) / (m + n)² + 3 d (m M₂'' − n M₂') / (m + n)
    M₄ = M₄' + M₄'' + d⁴ m n (m² − m n + n²) / (m + n)³
         + 6 d² (m² M₂'' + n² M₂') / (m + n)² + 4 d (m M₃'' − n M₃') / (m + n)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.sparse

from farandole.learn.linear.moments import Array
from farandole.learn.sources.chunk import Chunk
from farandole.learn.sums.sum import Statistics, Sum, as_statistics


@dataclass(frozen=True)
class Columns:
    """Rows of weight 0 count in `rows` only."""

    rows: int
    weight: float
    mean: Array
    powers: Array  # sums of the 2nd, 3rd, … powers of the columns less their means
    least: Array
    largest: Array


class ColumnSum(Sum):
    """All columns at once, without products of two of them. `highest` power: 2 or 4."""

    in_blocks = True

    def __init__(self, highest: int = 2) -> None:
        self.highest = highest

    def map(self, chunk: Chunk, state: Any) -> Statistics:
        X, weight = chunk.X, chunk.weight
        if chunk.weights is not None:
            X, weight = X[weight > 0], weight[weight > 0]
        total, columns = float(weight.sum()), X.shape[1]
        if not X.shape[0]:
            return as_statistics(
                rows=chunk.rows,
                weight=0.0,
                mean=np.zeros(columns),
                powers=np.zeros((self.highest - 1, columns)),
                least=np.full(columns, np.inf),
                largest=np.full(columns, -np.inf),
            )
        mean = weight @ X / total
        sparse = scipy.sparse.issparse(X)
        if sparse:
            powers = self._sparse_powers(X, weight, mean)
        else:
            powers = self._powers(X, None if chunk.weights is None else weight, mean)
        least, largest = X.min(axis=0), X.max(axis=0)
        return as_statistics(
            rows=chunk.rows,
            weight=total,
            mean=mean,
            powers=powers,
            least=least.toarray() if sparse else least,
            largest=largest.toarray() if sparse else largest,
        )

    def _powers(self, X: Array, weight: Array | None, mean: Array) -> Array:
        centred = X - mean
        power = centred.copy() if weight is None else centred * weight[:, None]
        found = np.empty((self.highest - 1, X.shape[1]))
        for place in range(len(found)):
            power *= centred
            found[place] = power.sum(axis=0)
        return found

    def _sparse_powers(self, X: Any, weight: Array, mean: Array) -> Array:
        """Of what is stored, and of the zeros that are not, by their weight."""
        columns = X.shape[1]
        weights = np.repeat(weight, np.diff(X.indptr))
        centred = X.data - mean[X.indices]
        zeros = np.maximum(weight.sum() - np.bincount(X.indices, weights, columns), 0.0)
        return np.stack(
            [
                np.bincount(X.indices, weights * centred**power, columns) + zeros * (-mean) ** power
                for power in range(2, self.highest + 1)
            ]
        )

    def merge(self, left: Statistics, right: Statistics) -> Statistics:
        m, n = float(left["weight"]), float(right["weight"])
        rows = left["rows"] + right["rows"]
        if m <= 0 or n <= 0:
            return {**(right if m <= 0 else left), "rows": rows}
        d, total = right["mean"] - left["mean"], m + n
        powers = left["powers"] + right["powers"]
        powers[0] += d**2 * (m * n / total)
        if self.highest == 4:
            (a2, a3, _), (b2, b3, _) = left["powers"], right["powers"]
            powers[1] += d**3 * (m * n * (m - n) / total**2) + 3 * d * (m * b2 - n * a2) / total
            powers[2] += (
                d**4 * (m * n * (m * m - m * n + n * n) / total**3)
                + 6 * d**2 * (m * m * b2 + n * n * a2) / total**2
                + 4 * d * (m * b3 - n * a3) / total
            )
        return as_statistics(
            rows=rows,
            weight=total,
            mean=left["mean"] + d * (n / total),
            powers=powers,
            least=np.minimum(left["least"], right["least"]),
            largest=np.maximum(left["largest"], right["largest"]),
        )

    def finish(self, statistics: Statistics, state: Any) -> Columns:
        least, largest = statistics["least"], statistics["largest"]
        # The rounded mean of equal values may differ from them, which would leave a variance.
        constant = least == largest
        return Columns(
            rows=int(statistics["rows"]),
            weight=float(statistics["weight"]),
            mean=np.where(constant, least, statistics["mean"]),
            powers=np.where(constant, 0.0, statistics["powers"]),
            least=least,
            largest=largest,
        )
