"""Tables of counts, such as of words in documents."""

from __future__ import annotations

from typing import Any

import numpy as np
import scipy.sparse

from farandole.learn.sources.chunk import Chunk
from farandole.learn.sums.sum import Statistics, Sum, as_statistics


def require_counts(table: Any, name: str) -> None:
    """Raises `ValueError` for a table in memory with values below 0. `name`: the estimator's."""
    values = table.data if scipy.sparse.issparse(table) else table
    if isinstance(values, np.ndarray) and values.size and np.nanmin(values) < 0:
        raise ValueError(f"Negative values in data passed to {name} (input X)")


class LeastSum(Sum):
    """The least value of a table, for those that are read chunk by chunk."""

    def map(self, chunk: Chunk, state: Any) -> Statistics:
        return as_statistics(least=chunk.X.min())

    def merge(self, left: Statistics, right: Statistics) -> Statistics:
        return {"least": np.minimum(left["least"], right["least"])}

    def finish(self, statistics: Statistics, state: Any) -> float:
        return float(statistics["least"])
