"""Spectral clustering: k-means on the leading eigenvectors of the normalised similarities."""

from __future__ import annotations

from typing import Any, Self

import numpy as np
from scipy import linalg
from sklearn.base import ClusterMixin

from farandole.learn.cluster.kmeans import KMeans
from farandole.learn.cluster.landmarks import (
    DrawnRowsSum,
    FeatureProductSum,
    FeatureTotalSum,
    Normalised,
    as_landmarks,
)
from farandole.learn.estimators.base import SumEstimator
from farandole.learn.linear.moments import Array
from farandole.learn.sources.source import Source
from farandole.learn.statistics.columns import ColumnSum
from farandole.learn.sums.seed import SeedSum
from farandole.learn.sums.together import Together


class SpectralClustering(ClusterMixin, SumEstimator):
    """The similarity of rows is exp(−gamma ‖a − b‖²).

    Similarities are those to `n_landmarks` rows, drawn at random (Nyström's method): exact if there
    are no more rows than that, else an approximation whose cost grows with the rows and not with
    their square. The embedding, rows × clusters, is in memory.
    """

    def __init__(
        self,
        n_clusters: int = 8,
        *,
        gamma: float = 1.0,
        n_landmarks: int = 500,
        n_init: int = 10,
        random_state: Any = None,
        pool: Any = None,
        chunk_rows: int = 0,
    ) -> None:
        self.n_clusters = n_clusters
        self.gamma = gamma
        self.n_landmarks = n_landmarks
        self.n_init = n_init
        self.random_state = random_state
        self.pool = pool
        self.chunk_rows = chunk_rows

    def fit(self, X: Any, y: Any = None) -> Self:
        """Of X (rows × columns). `y` is not used."""
        if not self.gamma > 0:
            raise ValueError(f"gamma={self.gamma!r}: it is above 0.")
        if self.n_clusters < 1 or self.n_landmarks < self.n_clusters:
            raise ValueError(
                f"n_clusters={self.n_clusters}, n_landmarks={self.n_landmarks}: the first is 1 or "
                "more, and the second no less than the first."
            )
        with self._placed(X, least_rows=2) as placed:
            if placed.source.rows < self.n_clusters:
                raise ValueError(
                    f"n_samples={placed.source.rows} should be >= n_clusters={self.n_clusters}."
                )
            first = placed.sum(Together(columns=ColumnSum(), seed=SeedSum(self.random_state)))
            seed = first["seed"]
            rows = placed.sum(DrawnRowsSum(seed, self.n_landmarks))
            landmarks = as_landmarks(rows, first["columns"].mean, self.gamma)
            normalised = placed.sum(FeatureTotalSum(), landmarks)
            products = placed.sum(FeatureProductSum(), normalised)
            vectors = self._leading(products)
            self.embedding_ = _embedding(placed.source, normalised, vectors)
        inner = KMeans(
            self.n_clusters,
            n_init=self.n_init,
            random_state=seed,
            pool=self.pool,
            chunk_rows=self.chunk_rows,
        )
        self.labels_ = inner.fit(self.embedding_).labels_
        return self

    def _leading(self, products: Array) -> Array:
        """As many directions of the features as clusters, of unit length in the rows."""
        size = len(products)
        count = min(self.n_clusters, size)
        values, vectors = linalg.eigh(products, subset_by_index=(size - count, size - 1))
        found: Array = vectors[:, ::-1] / np.sqrt(np.maximum(values[::-1], np.finfo(float).tiny))
        return found


def _embedding(source: Source, normalised: Normalised, vectors: Array) -> Array:
    """Of each row, as scikit-learn scales it."""
    parts = []
    for number in range(source.chunks):
        features, degrees = normalised.features(source.read(number).X)
        parts.append(features @ vectors / np.sqrt(degrees)[:, None])
    return np.concatenate(parts)
