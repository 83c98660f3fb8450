"""Principal components, from the covariance: one pass over the data."""

from __future__ import annotations

from typing import Any, Self

import numpy as np
from scipy import linalg
from sklearn.base import ClassNamePrefixFeaturesOutMixin, TransformerMixin

from farandole.learn.estimators.base import SumEstimator
from farandole.learn.linear.moments import Array, Moments, MomentSum


class PCA(ClassNamePrefixFeaturesOutMixin, TransformerMixin, SumEstimator):
    """`n_components`: how many (None: all), or below 1 the share of the variance to explain."""

    def __init__(
        self,
        n_components: float | None = None,
        *,
        whiten: bool = False,
        pool: Any = None,
        chunk_rows: int = 0,
    ) -> None:
        self.n_components = n_components
        self.whiten = whiten
        self.pool = pool
        self.chunk_rows = chunk_rows

    def fit(self, X: Any, y: Any = None) -> Self:
        """Of X (rows × columns). `y` is not used."""
        with self._placed(X, least_rows=2) as placed:
            moments: Moments = placed.sum(MomentSum())
        values, vectors = linalg.eigh(moments.products / (moments.rows - 1))
        values, vectors = np.clip(values[::-1], 0.0, None), vectors[:, ::-1].T
        largest = min(moments.rows, len(values))
        count = self._count(values[:largest], largest)
        # The sign of a direction is free: as in scikit-learn, its largest part is positive.
        signs = np.sign(vectors[np.arange(len(vectors)), np.abs(vectors).argmax(axis=1)])
        self.mean_ = moments.mean
        self.components_ = np.ascontiguousarray((vectors * signs[:, None])[:count])
        self.explained_variance_ = values[:count]
        total = values.sum()
        self.explained_variance_ratio_ = values[:count] / total if total > 0 else values[:count]
        self.singular_values_ = np.sqrt(values[:count] * (moments.rows - 1))
        self.noise_variance_ = float(values[count:largest].mean()) if count < largest else 0.0
        self.n_components_ = count
        self.n_samples_ = moments.rows
        return self

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
