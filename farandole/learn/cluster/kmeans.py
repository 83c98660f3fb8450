"""k-means: Lloyd's iterations, one sum each, from the starts of k-means‖."""

from __future__ import annotations

import warnings
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from sklearn.base import ClusterMixin, TransformerMixin
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils.validation import check_is_fitted

from farandole.learn.cluster.iterations import drawn_centres, iterate
from farandole.learn.cluster.lloyd import CostSum, LabelSum
from farandole.learn.cluster.nearest import NearestCentres, squared_distances
from farandole.learn.estimators.base import SumEstimator
from farandole.learn.linear.moments import Array
from farandole.learn.pools.base import Placed
from farandole.learn.statistics.columns import ColumnSum
from farandole.learn.sums.seed import SeedSum
from farandole.learn.sums.sum import Sum
from farandole.learn.sums.together import Together


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
        with self._placed(X, sample_weight=sample_weight) as placed:
            if placed.source.rows < self.n_clusters:
                raise ValueError(
                    f"n_samples={placed.source.rows} should be >= n_clusters={self.n_clusters}."
                )
            tolerance, starts = self._begin(placed)
            found = [iterate(placed, start, tolerance, self.max_iter) for start in starts]
            labelled = [placed.sum(LabelSum(), each.centres) for each in found]
        chosen = min(range(len(found)), key=lambda at: float(labelled[at]["cost"]))
        best = found[chosen]
        if not best.converged:
            warnings.warn(
                f"not converged after {best.iterations} iterations. Raise max_iter or tol.",
                ConvergenceWarning,
                stacklevel=2,
            )
        self.cluster_centers_ = best.centres
        self.inertia_ = float(labelled[chosen]["cost"])
        self.n_iter_ = best.iterations
        self._n_features_out = len(best.centres)
        self.labels_ = labelled[chosen]["labels"]
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
        check_is_fitted(self)
        nearest = NearestCentres(self.cluster_centers_)
        found: npt.NDArray[np.int32] = self._by_rows(X, nearest.of_rows).astype(np.int32)
        return found

    def transform(self, X: Any) -> Array:
        """The distance of each row from each centre."""
        found: Array = self._by_rows(
            X, lambda rows: np.sqrt(squared_distances(rows, self.cluster_centers_))
        )
        return found

    def score(self, X: Any, y: Any = None, sample_weight: Any = None) -> float:
        """Minus the summed squared distance of all rows from the nearest centre."""
        check_is_fitted(self)
        with self._placed(X, sample_weight=sample_weight, reset=False) as placed:
            return -float(placed.sum(CostSum(), self.cluster_centers_))

    def _begin(self, placed: Placed) -> tuple[float, list[Array]]:
        """The squared movement to end at, and the centres to start from. Takes no pass if neither
        depends on the data."""
        jobs: dict[str, Sum] = {}
        if self.tol > 0:
            jobs["columns"] = ColumnSum()
        if isinstance(self.init, str):
            jobs["seed"] = SeedSum(self.random_state)
        first = placed.sum(Together(**jobs)) if jobs else {}
        tolerance = 0.0
        if "columns" in first:
            tolerance = self.tol * first["columns"].powers[0].mean() / first["columns"].weight
        return tolerance, self._starts(placed, first.get("seed", 0))

    def _starts(self, placed: Placed, seed: int) -> list[Array]:
        """With centres given, one start is all."""
        if not isinstance(self.init, str):
            centres = np.array(self.init, dtype=np.float64)
            wanted = (self.n_clusters, placed.source.columns)
            if centres.shape != wanted:
                raise ValueError(f"init has the shape {centres.shape}, and needs {wanted}.")
            return [centres]
        if self.init != "k-means||":
            raise ValueError(f"init={self.init!r}: give 'k-means||' or an array of centres.")
        random = np.random.RandomState(seed)
        seeds = [int(random.randint(2**31)) for _ in range(self.n_init)]
        return [drawn_centres(placed, self.n_clusters, each) for each in seeds]
