"""`describe`: what is known of a table after one pass over it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from farandole.learn.estimators.base import SumEstimator
from farandole.learn.linear.moments import Array, Moments, MomentSum
from farandole.learn.statistics.columns import Columns, ColumnSum
from farandole.learn.statistics.distinct import STANDARD_ERROR, DistinctSum
from farandole.learn.statistics.sketch import SketchSum, Summary
from farandole.learn.sums.sum import Statistics
from farandole.learn.sums.together import Together


def describe(
    X: Any,
    sample_weight: Any = None,
    *,
    covariance: bool = True,
    sketch_size: int = 2048,
    ddof: int = 1,
    pool: Any = None,
    chunk_rows: int = 0,
) -> Description:
    """Moments, ranges, quantiles and numbers of distinct values of the columns of X, in one pass.

    `covariance` keeps the products of all columns, columns² numbers. Quantiles, histograms and
    numbers of distinct values are exact for columns with up to `sketch_size` distinct values; for
    others `Description.quantile_error` says how exact they are. `ddof`: the variance is divided by
    the weight of all rows less this, as in `scipy.stats.describe`. Rows with NaN are refused.
    """
    if sketch_size < 2:
        raise ValueError(f"sketch_size={sketch_size}: it is 2 or more.")
    settings = _Describer(covariance, sketch_size, pool, chunk_rows)
    statistics = settings.statistics_of(X, sample_weight, reset=True)
    return Description(settings, statistics, ddof, weighted=sample_weight is not None)


class _Describer(SumEstimator):
    """How to describe. Knows the names and the number of columns after the first rows."""

    def __init__(self, covariance: bool, sketch_size: int, pool: Any, chunk_rows: int) -> None:
        self.covariance = covariance
        self.sketch_size = sketch_size
        self.pool = pool
        self.chunk_rows = chunk_rows

    def statistics_of(self, X: Any, sample_weight: Any, *, reset: bool) -> Statistics:
        with self._placed(X, sample_weight=sample_weight, reset=reset) as placed:
            found: Statistics = placed.sum(self.job())
        return found

    def job(self) -> _DescribeSum:
        return _DescribeSum(covariance=self.covariance, sketch_size=self.sketch_size)


class _DescribeSum(Together):
    """Keeps its statistics, which later rows are merged with."""

    def __init__(self, *, covariance: bool, sketch_size: int) -> None:
        products = {"products": MomentSum()} if covariance else {}
        super().__init__(
            columns=ColumnSum(4), sketch=SketchSum(sketch_size), distinct=DistinctSum(), **products
        )

    def finish(self, statistics: Statistics, state: Any) -> Statistics:
        return statistics

    def results(self, statistics: Statistics) -> dict[str, Any]:
        found: dict[str, Any] = super().finish(statistics, None)
        return found


class Description:
    """Each attribute has an entry for each column."""

    def __init__(
        self, settings: _Describer, statistics: Statistics, ddof: int, *, weighted: bool
    ) -> None:
        self._settings = settings
        self._weighted = weighted
        self._statistics = statistics
        self._ddof = ddof
        results = settings.job().results(statistics)
        columns: Columns = results["columns"]
        self.summaries: list[Summary] = results["sketch"]
        self._products: Moments | None = results.get("products")
        self.names = getattr(settings, "feature_names_in_", None)
        self.rows, self.weight = columns.rows, columns.weight
        self.mean, self.min, self.max = columns.mean, columns.least, columns.largest
        second, third, fourth = columns.powers / self.weight
        self.variance = columns.powers[0] / self._degrees()
        with np.errstate(invalid="ignore", divide="ignore"):
            # Of a constant column they are not defined: NaN, as in SciPy.
            self.skewness = third / second**1.5
            self.kurtosis = fourth / second**2 - 3
        self.quantile_error = np.array([each.error for each in self.summaries]) / self.weight
        exact = self.quantile_error == 0
        counted = np.array([len(each.values) for each in self.summaries])
        self.unique = np.where(exact, counted, np.rint(results["distinct"])).astype(np.int64)
        self.unique_error = np.where(exact, 0.0, STANDARD_ERROR)

    @property
    def std(self) -> Array:
        found: Array = np.sqrt(self.variance)
        return found

    @property
    def covariance(self) -> Array:
        """Columns × columns."""
        if self._products is None:
            raise ValueError("the covariance was not computed: describe(…, covariance=True).")
        found: Array = self._products.products / self._degrees()
        # Exactly the variances, also of columns that are constant.
        np.fill_diagonal(found, self.variance)
        return found

    def quantile(self, q: float | Sequence[float]) -> Array:
        """A row for each q, or one. Wrong in rank by at most `quantile_error` of all rows.

        Between two values it is linear, as in `numpy.quantile`; with weights it is the first value
        that no less than q of the weight is up to.
        """
        asked = np.atleast_1d(np.asarray(q, dtype=np.float64))
        if not ((asked >= 0) & (asked <= 1)).all():
            raise ValueError(f"q={q!r}: quantiles are between 0 and 1.")
        found = np.stack([self._quantiles(each, asked) for each in self.summaries], axis=1)
        # These two are always known.
        found[asked == 0], found[asked == 1] = self.min, self.max
        return found[0] if np.ndim(q) == 0 else found

    def _quantiles(self, summary: Summary, asked: Array) -> Array:
        if self._weighted:
            ends = np.cumsum(summary.weights)
            place = np.searchsorted(ends, asked * ends[-1], side="left")
            values: Array = summary.values[np.minimum(place, len(ends) - 1)]
            return values
        position = asked * (self.weight - 1)
        low = np.floor(position)
        below, above = summary.at(low), summary.at(np.ceil(position))
        return below + (above - below) * (position - low)

    @property
    def median(self) -> Array:
        return self.quantile(0.5)

    def histogram(
        self, column: int, bins: int | Sequence[float] = 10
    ) -> tuple[Array, npt.NDArray[np.float64]]:
        """The weight in each of these bins, and their edges, as `numpy.histogram`.

        Each weight is wrong by at most twice `quantile_error` of all.
        """
        edges = np.histogram_bin_edges(np.array([self.min[column], self.max[column]]), bins)
        below = self.summaries[column].below(edges)
        below[-1] = self.summaries[column].below(edges[-1:], inclusive=True)[0]
        return np.diff(below), edges

    def add(self, X: Any, sample_weight: Any = None) -> Description:
        """The description of these rows together with those before."""
        more = self._settings.statistics_of(X, sample_weight, reset=False)
        merged = self._settings.job().merge(self._statistics, more)
        weighted = self._weighted or sample_weight is not None
        return Description(self._settings, merged, self._ddof, weighted=weighted)

    def _degrees(self) -> float:
        return self.weight - self._ddof if self.weight > self._ddof else float("nan")

    def __repr__(self) -> str:
        names = self.names if self.names is not None else [f"x{at}" for at in range(len(self.mean))]
        quartiles = self.quantile([0.25, 0.5, 0.75])
        rows: list[tuple[str, ...]] = [
            ("", "mean", "std", "min", "25%", "50%", "75%", "max", "unique")
        ]
        for at, name in enumerate(names):
            figures = (self.mean[at], self.std[at], self.min[at], *quartiles[:, at], self.max[at])
            about = "" if self.unique_error[at] == 0 else "~"
            cells = [f"{figure:.6g}" for figure in figures]
            rows.append((str(name), *cells, f"{about}{self.unique[at]}"))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        ]
        return "\n".join([f"{self.rows} rows", *lines])
