"""Principal components: from the covariance in one pass, or by randomised subspace iteration."""

from __future__ import annotations

from typing import Any, NamedTuple, Self

import numpy as np
from scipy import linalg
from sklearn.base import ClassNamePrefixFeaturesOutMixin, TransformerMixin

from farandole.learn.decomposition.subspace import leading_directions, with_signs
from farandole.learn.estimators.base import SumEstimator
from farandole.learn.linear.moments import Array, Moments, MomentSum
from farandole.learn.pools.base import Placed
from farandole.learn.statistics.columns import Columns, ColumnSum
from farandole.learn.sums.seed import SeedSum
from farandole.learn.sums.together import Together

_SOLVERS = ("auto", "covariance_eigh", "randomized")
_WIDE = 1000  # columns from which on "auto" avoids the covariance of all of them


class _Spectrum(NamedTuple):
    """The variances of `vectors`, and of all directions together."""

    rows: int
    mean: Array
    vectors: Array
    variances: Array
    total: float


class PCA(ClassNamePrefixFeaturesOutMixin, TransformerMixin, SumEstimator):
    """`n_components`: how many (None: all), or below 1 the share of the variance to explain.

    svd_solver: "covariance_eigh" takes one pass and columns² numbers; "randomized" takes
    `iterated_power` + 2 passes and columns × (n_components + n_oversamples) numbers, and needs a
    number of components. "auto" is the latter from 1,000 columns on, for up to a tenth of them.
    """

    def __init__(
        self,
        n_components: float | None = None,
        *,
        whiten: bool = False,
        svd_solver: str = "auto",
        iterated_power: int = 5,
        n_oversamples: int = 10,
        random_state: Any = None,
        pool: Any = None,
        chunk_rows: int = 0,
    ) -> None:
        self.n_components = n_components
        self.whiten = whiten
        self.svd_solver = svd_solver
        self.iterated_power = iterated_power
        self.n_oversamples = n_oversamples
        self.random_state = random_state
        self.pool = pool
        self.chunk_rows = chunk_rows

    def fit(self, X: Any, y: Any = None) -> Self:
        """Of X (rows × columns). `y` is not used."""
        if self.svd_solver not in _SOLVERS:
            raise ValueError(f"svd_solver={self.svd_solver!r}: known are {_SOLVERS}.")
        with self._placed(X, least_rows=2) as placed:
            randomised = self._is_randomised(placed.source.columns)
            found = self._random_spectrum(placed) if randomised else _spectrum(placed)
        largest = min(found.rows, self.n_features_in_)
        count = self._count(found.variances[:largest], largest)
        variances = found.variances[:count]
        self.mean_ = found.mean
        self.components_ = found.vectors[:count]
        self.explained_variance_ = variances
        total = found.total
        self.explained_variance_ratio_ = variances / total if total > 0 else variances
        self.singular_values_ = np.sqrt(variances * (found.rows - 1))
        rest = max(0.0, total - float(variances.sum()))
        self.noise_variance_ = rest / (largest - count) if count < largest else 0.0
        self.n_components_ = count
        self.n_samples_ = found.rows
        return self

    def _is_randomised(self, columns: int) -> bool:
        wanted = self.n_components
        if self.svd_solver != "randomized":
            few = wanted is not None and 1 <= wanted <= columns // 10
            return self.svd_solver == "auto" and columns >= _WIDE and few
        if wanted is None or not wanted >= 1:
            raise ValueError(
                f"n_components={wanted!r} with svd_solver='randomized': give the number of "
                "components, or svd_solver='covariance_eigh'."
            )
        return True

    def _random_spectrum(self, placed: Placed) -> _Spectrum:
        wanted = self._count(np.empty(0), min(placed.source.rows, placed.source.columns))
        first = placed.sum(Together(columns=ColumnSum(), seed=SeedSum(self.random_state)))
        columns: Columns = first["columns"]
        found = leading_directions(
            placed, wanted, columns.mean, first["seed"], self.n_oversamples, self.iterated_power
        )
        degrees = columns.rows - 1
        total = float(columns.powers[0].sum()) / degrees
        return _Spectrum(columns.rows, columns.mean, found.vectors, found.squares / degrees, total)

    def transform(self, X: Any) -> Array:
        """The rows in the directions of the components."""

        def project(rows: Any) -> Array:
            # Not `(rows − mean) @ …`, which would fill sparse rows.
            found: Array = rows @ self.components_.T - self.mean_ @ self.components_.T
            return found / self._scale() if self.whiten else found

        found: Array = self._by_rows(X, project)
        return found

    def inverse_transform(self, X: Any) -> Array:
        """The rows that `transform` makes these of, nearest to the mean."""
        scaled = np.asarray(X) * self._scale() if self.whiten else np.asarray(X)
        found: Array = scaled @ self.components_ + self.mean_
        return found

    @property
    def _n_features_out(self) -> int:
        return len(self.components_)

    def _scale(self) -> Array:
        scale = np.sqrt(self.explained_variance_)
        return np.where(scale > np.finfo(float).eps, scale, np.finfo(float).eps)

    def _count(self, values: Array, largest: int) -> int:
        wanted = self.n_components
        if wanted is None:
            return largest
        if 0 < wanted < 1:
            shares = np.cumsum(values) / max(values.sum(), np.finfo(float).tiny)
            return min(largest, int(np.searchsorted(shares, wanted, side="right")) + 1)
        if wanted != int(wanted) or not 1 <= wanted <= largest:
            raise ValueError(
                f"n_components={wanted!r} must be between 1 and min(n_samples, n_features)="
                f"{largest}, or a share between 0 and 1."
            )
        return int(wanted)


def _spectrum(placed: Placed) -> _Spectrum:
    moments: Moments = placed.sum(MomentSum())
    values, vectors = linalg.eigh(moments.products / (moments.rows - 1))
    values, vectors = np.clip(values[::-1], 0.0, None), vectors[:, ::-1].T
    return _Spectrum(moments.rows, moments.mean, with_signs(vectors), values, float(values.sum()))
