"""Quantiles of columns from summaries that merge, with an error that is known.

The summary of a column are at most `size` of its values, sorted, with the weights that they stand
for. Equal values are one. While a column has no more distinct values than that, nothing is lost.
Else neighbours are put together, into groups of about a `size`-th of the weight, and each group is
represented by its weighted median:

    values      1   2   4   7   9          the weight below some x is wrong by what lies on the
    weights     1   1   2   1   1          wrong side of the median of the one group that x is in:
               └──── 2 ────┘ └─ 7 ─┘       at most max(before the median, after it), over all groups

Two summaries merge by adding their weights, so their errors add too, and so does that of putting
together what is then too many. Each summary carries this sum, which is a bound and no estimate. A
tree over n chunks puts together at most 1 + log₂ n times: no more than (1 + log₂ n) / `size` of
the weight is ever misplaced, and about half of that where no value is heavy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from farandole.learn.linear.moments import Array
from farandole.learn.sources.chunk import Chunk
from farandole.learn.sums.sum import Statistics, Sum, as_statistics


class Summary(NamedTuple):
    """Of one column. `error` is the largest weight that may be misplaced; 0: every value is
    here."""

    values: Array
    weights: Array
    error: float

    def shrunk(self, size: int) -> Summary:
        """With at most `size` values."""
        if len(self.values) <= size:
            return self
        ends = np.cumsum(self.weights)
        total = ends[-1]
        group = np.minimum((ends - self.weights / 2) * (size / total), size - 1).astype(np.int64)
        first = np.flatnonzero(np.diff(group, prepend=-1))
        last = np.append(first[1:], len(group)) - 1
        begin = ends[first] - self.weights[first]
        medians = np.searchsorted(ends, begin + (ends[last] - begin) / 2)
        medians = np.clip(medians, first, last)
        before = ends[medians] - self.weights[medians] - begin
        after = ends[last] - ends[medians]
        lost = float(np.maximum(before, after).max())
        weights = np.add.reduceat(self.weights, first)
        return Summary(self.values[medians], weights, self.error + lost)

    def below(self, x: Array, *, inclusive: bool = False) -> Array:
        """The weight of all values below each x, to within `error`."""
        ends = np.concatenate([[0.0], np.cumsum(self.weights)])
        found: Array = ends[np.searchsorted(self.values, x, "right" if inclusive else "left")]
        return found

    def at(self, position: Array) -> Array:
        """The value at a place of the sorted rows, which counts weights from 0 on."""
        place = np.searchsorted(np.cumsum(self.weights), position, side="right")
        found: Array = self.values[np.minimum(place, len(self.values) - 1)]
        return found


def summarise(values: Array, weights: Array | None) -> Summary:
    """Sorted, and each value once."""
    if weights is None:
        values = np.sort(values)
    else:
        order = np.argsort(values, kind="stable")
        values, weights = values[order], weights[order]
    if not len(values):
        return Summary(values, values, 0.0)
    first = np.flatnonzero(np.concatenate([[True], values[1:] != values[:-1]]))
    if weights is None:
        counts = np.diff(np.append(first, len(values))).astype(np.float64)
        return Summary(values[first], counts, 0.0)
    return Summary(values[first], np.add.reduceat(weights, first), 0.0)


@dataclass(frozen=True)
class SketchSum(Sum):
    """Summaries of all columns, with up to `size` values each."""

    size: int

    def map(self, chunk: Chunk, state: Any) -> Statistics:
        X = chunk.dense
        weights = chunk.weights
        if weights is not None:
            X, weights = X[weights > 0], weights[weights > 0]
        columns = np.ascontiguousarray(X.T)
        return _packed([summarise(column, weights).shrunk(self.size) for column in columns])

    def merge(self, left: Statistics, right: Statistics) -> Statistics:
        found = []
        for a, b in zip(_unpacked(left), _unpacked(right), strict=True):
            both = summarise(
                np.concatenate([a.values, b.values]), np.concatenate([a.weights, b.weights])
            )
            found.append(both._replace(error=a.error + b.error).shrunk(self.size))
        return _packed(found)

    def finish(self, statistics: Statistics, state: Any) -> list[Summary]:
        return _unpacked(statistics)


def _packed(summaries: list[Summary]) -> Statistics:
    return as_statistics(
        values=np.concatenate([each.values for each in summaries]),
        weights=np.concatenate([each.weights for each in summaries]),
        ends=np.cumsum([len(each.values) for each in summaries]),
        errors=np.array([each.error for each in summaries]),
    )


def _unpacked(statistics: Statistics) -> list[Summary]:
    ends = statistics["ends"][:-1]
    values, weights = (np.split(statistics[name], ends) for name in ("values", "weights"))
    errors = statistics["errors"].tolist()
    return [Summary(*each) for each in zip(values, weights, errors, strict=True)]
