"""k-means: Lloyd's iterations, one sum each, from the starts of k-means‖."""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt
from sklearn.base import ClusterMixin, TransformerMixin
from sklearn.cluster import KMeans as SklearnKMeans
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils import check_random_state

from farandole.learn.cluster.lloyd import (
    CostSum,
    LloydSum,
    OneRowSum,
    OversampleSum,
    squared_distances,
)
from farandole.learn.estimators.base import SumEstimator
from farandole.learn.linear.moments import Array, MomentSum
from farandole.learn.pools.base import Placed

_TURNS = 5  # of k-means‖; more make little difference
_OVERSAMPLING = 2.0  # rows to draw in each turn, in numbers of clusters


class _Clustering(NamedTuple):
    centres: Array
    inertia: float
    iterations: int
    converged: bool


class KMeans(TransformerMixin, ClusterMixin, SumEstimator):
    """`init` is "k-means||" or an array of centres. Of `n_init` starts the best is kept."""

    def __init__(
        self,
        n_clusters: int = 8,
        *,
        init: Any = "k-means||",
        n_init: int = 1,
        max_iter: int = 300,
        tol: float = 1e-4,
        random_state: Any = None,
        pool: Any = None,
        chunk_rows: int = 0,
        verbose: bool = False,
    ) -> None:
        self.n_clusters = n_clusters
        self.init = init
        self.n_init = n_init
        self.max_iter = max_iter
        self.tol = tol
        self.random_state = random_state
        self.pool = pool
        self.chunk_rows = chunk_rows
        self.verbose = verbose

    def fit(self, X: Any, y: Any = None, sample_weight: Any = None) -> Self:
        """Of X (rows × columns). `y` is not used."""
        if self.n_clusters < 1 or self.n_init < 1 or self.max_iter < 1:
            raise ValueError(
                f"n_clusters={self.n_clusters}, n_init={self.n_init}, max_iter={self.max_iter}: "
                "each is 1 or more."
            )
        random = check_random_state(self.random_state)
        seeds = [int(random.randint(2**31)) for _ in range(self.n_init)]
        with self._placed(X, sample_weight=sample_weight) as placed:
            if placed.source.rows < self.n_clusters:
                raise ValueError(
                    f"n_samples={placed.source.rows} should be >= n_clusters={self.n_clusters}."
                )
            moments = placed.sum(MomentSum())
            variance = np.diag(moments.products).mean() / moments.weight
            starts = [self._start(placed, seed) for seed in self._distinct(seeds)]
            found = [self._iterate(placed, start, self.tol * variance) for start in starts]
        best = min(found, key=lambda each: each.inertia)
        if not best.converged:
            warnings.warn(
                f"not converged after {best.iterations} iterations. Raise max_iter or tol.",
                ConvergenceWarning,
                stacklevel=2,
            )
        self.cluster_centers_ = best.centres
        self.inertia_ = best.inertia
        self.n_iter_ = best.iterations
        self._n_features_out = len(best.centres)
        self.labels_ = self.predict(X)
        distinct = len(np.unique(self.labels_))
        if distinct < self.n_clusters:
            warnings.warn(
                f"Number of distinct clusters ({distinct}) found smaller than n_clusters "
                f"({self.n_clusters}). Possibly due to duplicate points in X.",
                ConvergenceWarning,
                stacklevel=2,
            )
        return self

    def predict(self, X: Any) -> npt.NDArray[np.int32]:
        """The nearest centre of each row."""
        found: npt.NDArray[np.int32] = self._by_rows(
            X, lambda rows: squared_distances(rows, self.cluster_centers_).argmin(axis=1)
        ).astype(np.int32)
        return found

    def transform(self, X: Any) -> Array:
        """The distance of each row from each centre."""
        found: Array = self._by_rows(
            X, lambda rows: np.sqrt(squared_distances(rows, self.cluster_centers_))
        )
        return found

    def score(self, X: Any, y: Any = None, sample_weight: Any = None) -> float:
        """Minus the summed squared distance of all rows from the nearest centre."""
        with self._placed(X, sample_weight=sample_weight, reset=False) as placed:
            return -float(placed.sum(CostSum(), self.cluster_centers_))

    def _distinct(self, seeds: list[int]) -> list[int]:
        """With centres given, one start is all."""
        return seeds if isinstance(self.init, str) else seeds[:1]

    def _start(self, placed: Placed, seed: int) -> Array:
        if not isinstance(self.init, str):
            centres = np.array(self.init, dtype=np.float64)
            wanted = (self.n_clusters, placed.source.columns)
            if centres.shape != wanted:
                raise ValueError(f"init has the shape {centres.shape}, and needs {wanted}.")
            return centres
        if self.init != "k-means||":
            raise ValueError(f"init={self.init!r}: give 'k-means||' or an array of centres.")
        candidates = placed.sum(OneRowSum(seed))[None, :]
        for turn in range(_TURNS):
            cost = placed.sum(CostSum(), candidates)
            if not cost > 0:
                break  # every row is a candidate
            job = OversampleSum(seed, turn, cost, _OVERSAMPLING * self.n_clusters)
            candidates = np.concatenate([candidates, placed.sum(job, candidates)])
        return self._reduced(placed, candidates, seed)

    def _reduced(self, placed: Placed, candidates: Array, seed: int) -> Array:
        """As many as asked: the candidates, weighted by their rows, are few enough to cluster
        here."""
        if len(candidates) <= self.n_clusters:
            missing = self.n_clusters - len(candidates)
            more = [placed.sum(OneRowSum(seed + 1 + at)) for at in range(missing)]
            return np.concatenate([candidates, *(row[None, :] for row in more)])
        weights = placed.sum(LloydSum(), candidates)["counts"]
        small = SklearnKMeans(self.n_clusters, n_init=3, random_state=seed)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # equal rows; `fit` looks itself
            small.fit(candidates, sample_weight=weights)
        found: Array = small.cluster_centers_.astype(np.float64)
        return found

    def _iterate(self, placed: Placed, centres: Array, tolerance: float) -> _Clustering:
        job = LloydSum()
        for iteration in range(1, self.max_iter + 1):
            found = placed.sum(job, centres)
            counts = found["counts"][:, None]
            moved = centres + np.divide(
                found["shifts"], counts, out=np.zeros_like(centres), where=counts > 0
            )
            empty = np.flatnonzero(found["counts"] == 0)
            if len(empty) and found["far_distance"] > 0:
                moved[empty[0]] = found["far_row"]  # one a pass: the next pass has others far away
            shift = float(((moved - centres) ** 2).sum())
            centres = moved
            if shift <= tolerance and not (len(empty) and found["far_distance"] > 0):
                return _Clustering(centres, placed.sum(CostSum(), centres), iteration, True)
        return _Clustering(centres, placed.sum(CostSum(), centres), self.max_iter, False)
