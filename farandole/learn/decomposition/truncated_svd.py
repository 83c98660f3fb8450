"""The leading singular vectors of X itself: sparse rows stay sparse."""

from __future__ import annotations

from typing import Any, Self

import numpy as np
from sklearn.base import ClassNamePrefixFeaturesOutMixin, TransformerMixin

from farandole.learn.decomposition.subspace import leading_directions
from farandole.learn.estimators.base import SumEstimator
from farandole.learn.linear.moments import Array
from farandole.learn.statistics.columns import Columns, ColumnSum
from farandole.learn.sums.seed import SeedSum
from farandole.learn.sums.together import Together


class TruncatedSVD(ClassNamePrefixFeaturesOutMixin, TransformerMixin, SumEstimator):
    """By `n_iter` subspace iterations from `n_components` + `n_oversamples` random directions."""

    def __init__(
        self,
        n_components: int = 2,
        *,
        n_iter: int = 5,
        n_oversamples: int = 10,
        random_state: Any = None,
        pool: Any = None,
        chunk_rows: int = 0,
    ) -> None:
        self.n_components = n_components
        self.n_iter = n_iter
        self.n_oversamples = n_oversamples
        self.random_state = random_state
        self.pool = pool
        self.chunk_rows = chunk_rows

    def fit(self, X: Any, y: Any = None) -> Self:
        """Of X (rows × columns). `y` is not used."""
        if self.n_iter < 0 or self.n_oversamples < 0 or self.n_components < 1:
            raise ValueError(
                f"n_components={self.n_components}, n_iter={self.n_iter}, n_oversamples="
                f"{self.n_oversamples}: the first is 1 or more, the others 0 or more."
            )
        with self._placed(X, least_rows=2) as placed:
            if self.n_components > placed.source.columns:
                raise ValueError(
                    f"n_components={self.n_components} must be <= n_features="
                    f"{placed.source.columns}."
                )
            first = placed.sum(Together(columns=ColumnSum(), seed=SeedSum(self.random_state)))
            columns: Columns = first["columns"]
            found = leading_directions(
                placed, self.n_components, None, first["seed"], self.n_oversamples, self.n_iter
            )
        self.components_ = found.vectors
        self.singular_values_ = np.sqrt(found.squares)
        # Of the projected rows, which are not centred.
        means = found.vectors @ columns.mean
        self.explained_variance_ = np.maximum(found.squares / columns.rows - means**2, 0.0)
        total = float(columns.powers[0].sum()) / columns.rows
        variances = self.explained_variance_
        self.explained_variance_ratio_ = variances / total if total > 0 else 0 * variances
        return self

    def transform(self, X: Any) -> Array:
        """The rows in the directions of the components."""
        found: Array = self._by_rows(X, lambda rows: np.asarray(rows @ self.components_.T))
        return found

    def inverse_transform(self, X: Any) -> Array:
        """The rows that `transform` makes these of, nearest to zero."""
        found: Array = np.asarray(X) @ self.components_
        return found

    @property
    def _n_features_out(self) -> int:
        return len(self.components_)
