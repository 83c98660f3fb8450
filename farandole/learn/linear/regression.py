"""Linear regression, ridge, lasso and the elastic net, all from one pass over the data.

They need the products of all columns and nothing else: a matrix of columns × columns. That takes
memory by the square of the columns, and squares the condition of the problem: beyond about 10⁷ use
scikit-learn's, which factors X itself.
"""

from __future__ import annotations

import warnings
from typing import Any, Self

import numpy as np
from scipy import linalg
from sklearn.base import MultiOutputMixin, RegressorMixin
from sklearn.exceptions import ConvergenceWarning

from farandole.learn.estimators.base import SumEstimator
from farandole.learn.estimators.targets import numeric_targets
from farandole.learn.linear.coordinate_descent import descend
from farandole.learn.linear.moments import Array, Moments, MomentSum


class _Linear(MultiOutputMixin, RegressorMixin, SumEstimator):
    """`_solve` finds the coefficients from the products."""

    fit_intercept: bool

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Of X (rows × columns) and y (rows, or rows × targets)."""
        y = numeric_targets(y, type(self).__name__)
        if y.ndim == 2 and y.shape[1] == 1:
            y = self._one_target(y)
        with self._placed(X, y, sample_weight) as placed:
            moments: Moments = placed.sum(MomentSum(with_targets=True))
        columns = self.n_features_in_
        products = moments.products if self.fit_intercept else moments.about_zero()
        found = self._solve(
            products[:columns, :columns], products[:columns, columns:], moments
        ).T  # targets × columns
        mean_x, mean_y = moments.mean[:columns], moments.mean[columns:]
        intercept = mean_y - found @ mean_x if self.fit_intercept else np.zeros(len(mean_y))
        self.coef_ = found if y.ndim == 2 else found[0]
        self.intercept_ = self._intercept(intercept, many=y.ndim == 2)
        return self

    def predict(self, X: Any) -> Array:
        """Of each row."""
        found: Array = self._by_rows(X, lambda rows: rows @ self.coef_.T + self.intercept_)
        return found

    def _one_target(self, y: Array) -> Array:
        return y

    def _intercept(self, found: Array, *, many: bool) -> Any:
        if not self.fit_intercept:
            return 0.0
        return found if many else float(found[0])

    def _solve(self, xx: Array, xy: Array, moments: Moments) -> Array:
        raise NotImplementedError


class LinearRegression(_Linear):
    """Least squares by the normal equations. For a singular system the solution of least norm."""

    def __init__(
        self, *, fit_intercept: bool = True, pool: Any = None, chunk_rows: int = 0
    ) -> None:
        self.fit_intercept = fit_intercept
        self.pool = pool
        self.chunk_rows = chunk_rows

    def _solve(self, xx: Array, xy: Array, moments: Moments) -> Array:
        values, vectors = linalg.eigh(xx)
        # Relative to the columns' own sizes, in products: the square of what X itself allows.
        least = max(values.max(initial=0.0), 0.0) * max(len(xx), 1) * np.finfo(float).eps * 10
        kept = values > least
        self.rank_ = int(kept.sum())
        self.singular_ = np.sqrt(np.clip(values[::-1], 0, None))
        if self.rank_ < min(len(xx), moments.rows - int(self.fit_intercept)):
            warnings.warn(
                f"the system is singular: {self.rank_} of {len(xx)} columns are independent. The "
                "solution of least norm is taken.",
                linalg.LinAlgWarning,
                stacklevel=3,
            )
        inverse = np.divide(1.0, values, where=kept, out=np.zeros_like(values))
        found: Array = vectors @ (inverse[:, None] * (vectors.T @ xy))
        return found


class Ridge(_Linear):
    """Least squares with a penalty of `alpha` times the squared length of the coefficients."""

    def __init__(
        self,
        alpha: float = 1.0,
        *,
        fit_intercept: bool = True,
        pool: Any = None,
        chunk_rows: int = 0,
    ) -> None:
        self.alpha = alpha
        self.fit_intercept = fit_intercept
        self.pool = pool
        self.chunk_rows = chunk_rows

    def _solve(self, xx: Array, xy: Array, moments: Moments) -> Array:
        if not self.alpha >= 0:
            raise ValueError(f"alpha={self.alpha!r}: it is 0 or more.")
        system = xx + self.alpha * np.eye(len(xx))
        try:
            found: Array = linalg.solve(system, xy, assume_a="pos")
        except linalg.LinAlgError:
            found = linalg.pinvh(system) @ xy
        return found


class ElasticNet(_Linear):
    """Least squares with penalties on the sizes of the coefficients and on their squares.

    It minimises, as scikit-learn's does, with n the number of rows:

        ½/n ‖y − X w‖² + alpha · l1_ratio ‖w‖₁ + ½ alpha (1 − l1_ratio) ‖w‖²

    by descent along one coefficient after the other, on the products of the columns. The result
    satisfies the conditions of optimality to within `tol`, or a warning says by how much it does
    not; `dual_gap_` is the largest violation.
    """

    def __init__(
        self,
        alpha: float = 1.0,
        *,
        l1_ratio: float = 0.5,
        fit_intercept: bool = True,
        max_iter: int = 1000,
        tol: float = 1e-6,
        pool: Any = None,
        chunk_rows: int = 0,
    ) -> None:
        self.alpha = alpha
        self.l1_ratio = l1_ratio
        self.fit_intercept = fit_intercept
        self.max_iter = max_iter
        self.tol = tol
        self.pool = pool
        self.chunk_rows = chunk_rows

    def _one_target(self, y: Array) -> Array:
        return y[:, 0]

    def _ratio(self) -> float:
        return self.l1_ratio

    def _solve(self, xx: Array, xy: Array, moments: Moments) -> Array:
        ratio = self._ratio()
        if not self.alpha >= 0:
            raise ValueError(f"alpha={self.alpha!r}: it is 0 or more.")
        if not 0 <= ratio <= 1:
            raise ValueError(f"l1_ratio={ratio!r}: it is between 0 and 1.")
        gram, targets = xx / moments.weight, xy / moments.weight
        found, steps, violations = [], [], []
        for target in targets.T:
            result = descend(
                gram, target, self.alpha * ratio, self.alpha * (1 - ratio), self.tol, self.max_iter
            )
            found.append(result.coefficients)
            steps.append(result.iterations)
            violations.append(result.violation)
        self.n_iter_ = max(steps)
        self.dual_gap_ = max(violations)
        scale = max(1e-300, float(np.abs(targets).max(initial=0.0)))
        if self.dual_gap_ > self.tol * scale:
            warnings.warn(
                f"not converged after {self.n_iter_} iterations: the conditions of optimality are "
                f"violated by {self.dual_gap_:.3g}, {self.tol * scale:.3g} is allowed. Raise "
                "max_iter or tol.",
                ConvergenceWarning,
                stacklevel=3,
            )
        return np.stack(found, axis=1)


class Lasso(ElasticNet):
    """The elastic net with `l1_ratio=1`: most coefficients are exactly zero."""

    def __init__(
        self,
        alpha: float = 1.0,
        *,
        fit_intercept: bool = True,
        max_iter: int = 1000,
        tol: float = 1e-6,
        pool: Any = None,
        chunk_rows: int = 0,
    ) -> None:
        self.alpha = alpha
        self.fit_intercept = fit_intercept
        self.max_iter = max_iter
        self.tol = tol
        self.pool = pool
        self.chunk_rows = chunk_rows

    def _ratio(self) -> float:
        return 1.0
