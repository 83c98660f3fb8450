"""Mixtures of normal distributions, by expectation and maximisation."""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt
from scipy.special import logsumexp
from sklearn.base import DensityMixin
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils.validation import check_is_fitted

from farandole.learn.cluster.iterations import drawn_centres, iterate
from farandole.learn.estimators.base import SumEstimator
from farandole.learn.linear.moments import Array
from farandole.learn.mixture.em import KINDS, ExpectationSum, LikelihoodSum, Mixture, Start
from farandole.learn.pools.base import Placed
from farandole.learn.statistics.columns import ColumnSum
from farandole.learn.sums.seed import SeedSum
from farandole.learn.sums.together import Together

_START_ITERATIONS = 100  # of k-means, which only begins


class _Fit(NamedTuple):
    mixture: Mixture
    bounds: list[float]
    converged: bool


class GaussianMixture(DensityMixin, SumEstimator):
    """covariance_type: "full", "tied", "diag" or "spherical", with scikit-learn's meaning.

    Starts from k-means, or from `means_init`. Of `n_init` starts the best is kept.
    """

    _accepts_sparse = False

    def __init__(
        self,
        n_components: int = 1,
        *,
        covariance_type: str = "full",
        tol: float = 1e-3,
        reg_covar: float = 1e-6,
        max_iter: int = 100,
        n_init: int = 1,
        means_init: Any = None,
        random_state: Any = None,
        pool: Any = None,
        chunk_rows: int = 0,
    ) -> None:
        self.n_components = n_components
        self.covariance_type = covariance_type
        self.tol = tol
        self.reg_covar = reg_covar
        self.max_iter = max_iter
        self.n_init = n_init
        self.means_init = means_init
        self.random_state = random_state
        self.pool = pool
        self.chunk_rows = chunk_rows

    def fit(self, X: Any, y: Any = None) -> Self:
        """Of X (rows × columns). `y` is not used."""
        self._require_options()
        with self._placed(X, least_rows=2) as placed:
            if placed.source.rows < self.n_components:
                raise ValueError(
                    f"n_samples={placed.source.rows} should be >= n_components="
                    f"{self.n_components}: every component needs a row."
                )
            starts = self._starts(placed)
            best = max((self._iterate(placed, start) for start in starts), key=_last_bound)
        if not best.converged:
            warnings.warn(
                f"not converged after {len(best.bounds)} iterations. Raise max_iter or tol, or "
                "start elsewhere.",
                ConvergenceWarning,
                stacklevel=2,
            )
        self._keep(best)
        return self

    def fit_predict(self, X: Any, y: Any = None) -> npt.NDArray[np.int64]:
        """The component of each row."""
        return self.fit(X).predict(X)

    def _require_options(self) -> None:
        if self.n_components < 1 or self.n_init < 1 or self.max_iter < 1:
            raise ValueError(
                f"n_components={self.n_components}, n_init={self.n_init}, max_iter="
                f"{self.max_iter}: each is 1 or more."
            )
        if self.covariance_type not in KINDS:
            raise ValueError(f"covariance_type={self.covariance_type!r}: known are {KINDS}.")
        if not self.reg_covar >= 0:
            raise ValueError(f"reg_covar={self.reg_covar!r}: it is 0 or more.")

    def _starts(self, placed: Placed) -> list[Array]:
        if self.means_init is not None:
            means = np.array(self.means_init, dtype=np.float64)
            wanted = (self.n_components, placed.source.columns)
            if means.shape != wanted:
                raise ValueError(f"means_init has the shape {means.shape}, and needs {wanted}.")
            return [means]
        first = placed.sum(Together(columns=ColumnSum(), seed=SeedSum(self.random_state)))
        tolerance = 1e-4 * first["columns"].powers[0].mean() / first["columns"].weight
        random = np.random.RandomState(first["seed"])
        found = []
        for _ in range(self.n_init):
            drawn = drawn_centres(placed, self.n_components, int(random.randint(2**31)))
            found.append(iterate(placed, drawn, tolerance, _START_ITERATIONS).centres)
        return found

    def _iterate(self, placed: Placed, means: Array) -> _Fit:
        job = ExpectationSum(self.reg_covar)
        mixture, _ = placed.sum(job, Start(self.covariance_type, means))
        bounds: list[float] = []
        while len(bounds) < self.max_iter:
            mixture, bound = placed.sum(job, mixture)
            bounds.append(bound)
            if len(bounds) > 1 and abs(bound - bounds[-2]) < self.tol:
                return _Fit(mixture, bounds, True)
        return _Fit(mixture, bounds, False)

    def _keep(self, best: _Fit) -> None:
        mixture = best.mixture
        self.weights_, self.means_ = mixture.weights, mixture.means
        self.covariances_ = mixture.covariances
        self.precisions_cholesky_ = mixture.roots
        if mixture.kind in ("full", "tied"):
            self.precisions_ = mixture.roots @ np.swapaxes(mixture.roots, -1, -2)
        else:
            self.precisions_ = mixture.roots**2
        self.converged_, self.n_iter_ = best.converged, len(best.bounds)
        self.lower_bound_, self.lower_bounds_ = best.bounds[-1], best.bounds

    def _mixture(self) -> Mixture:
        kind, roots = self.covariance_type, self.precisions_cholesky_
        return Mixture(kind, self.weights_, self.means_, self.covariances_, roots)

    def _log_joint(self, X: Any) -> Array:
        found: Array = self._by_rows(X, lambda rows: self._mixture().log_joint(rows))
        return found

    def score_samples(self, X: Any) -> Array:
        """The log likelihood of each row."""
        found: Array = logsumexp(self._log_joint(X), axis=1)
        return found

    def score(self, X: Any, y: Any = None) -> float:
        """The mean log likelihood of the rows."""
        check_is_fitted(self)
        with self._placed(X, reset=False) as placed:
            return float(placed.sum(LikelihoodSum(), self._mixture()))

    def predict_proba(self, X: Any) -> Array:
        """The share of each component in each row."""
        joint = self._log_joint(X)
        found: Array = np.exp(joint - logsumexp(joint, axis=1, keepdims=True))
        return found

    def predict(self, X: Any) -> npt.NDArray[np.int64]:
        """The component with the largest share."""
        found: npt.NDArray[np.int64] = self._log_joint(X).argmax(axis=1)
        return found

    def bic(self, X: Any) -> float:
        """Bayes's information criterion: the lower the better."""
        rows = self.score_samples(X)
        return -2 * float(rows.sum()) + self._parameters() * float(np.log(len(rows)))

    def aic(self, X: Any) -> float:
        """Akaike's information criterion: the lower the better."""
        return -2 * float(self.score_samples(X).sum()) + 2 * self._parameters()

    def _parameters(self) -> int:
        components, columns = (int(size) for size in self.means_.shape)
        square = columns * (columns + 1) // 2
        of_covariances = {
            "full": components * square,
            "tied": square,
            "diag": components * columns,
            "spherical": components,
        }
        return of_covariances[self.covariance_type] + components * columns + components - 1


def _last_bound(fit: _Fit) -> float:
    return fit.bounds[-1]
