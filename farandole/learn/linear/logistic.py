"""Logistic regression: each step of Newton's method or of L-BFGS is one sum over the data."""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt
from scipy import linalg, optimize
from scipy.special import logsumexp
from sklearn.base import ClassifierMixin
from sklearn.exceptions import ConvergenceWarning

from farandole.learn.estimators.base import SumEstimator
from farandole.learn.estimators.classes import encoded
from farandole.learn.linear.moments import Array
from farandole.learn.linear.softmax import SoftmaxSum
from farandole.learn.pools.base import Placed

_NEWTON_PARAMETERS = 500  # beyond that the second derivatives cost more than they save


class LogisticRegression(ClassifierMixin, SumEstimator):
    """Minimises, as scikit-learn's does, C times the sum of the losses plus ½ ‖coefficients‖².

    solver: "newton" (few columns and classes), "lbfgs", or "auto". With two classes the
    coefficients are those of the second; with more, there is a row for each.
    """

    def __init__(
        self,
        *,
        C: float = 1.0,
        fit_intercept: bool = True,
        solver: str = "auto",
        max_iter: int = 100,
        tol: float = 1e-8,
        pool: Any = None,
        chunk_rows: int = 0,
        verbose: bool = False,
    ) -> None:
        self.C = C
        self.fit_intercept = fit_intercept
        self.solver = solver
        self.max_iter = max_iter
        self.tol = tol
        self.pool = pool
        self.chunk_rows = chunk_rows
        self.verbose = verbose

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Of X (rows × columns) and the labels y."""
        if not self.C > 0:
            raise ValueError(f"C={self.C!r}: it is above 0; inf is no penalty.")
        if self.solver not in ("auto", "newton", "lbfgs"):
            raise ValueError(f"solver={self.solver!r}: known are 'auto', 'newton' and 'lbfgs'.")
        self.classes_, places = encoded(y, type(self).__name__)
        with self._placed(X, places, sample_weight) as placed:
            if len(self.classes_) < 2:
                raise ValueError(
                    f"This solver needs samples of at least 2 classes in the data, but the data "
                    f"contains only one class: {self.classes_[0]!r}"
                )
            objective = _Objective(placed, len(self.classes_), self.C, self.fit_intercept)
            found = self._minimise(objective)
        self.n_iter_ = np.array([found.iterations])
        if not found.converged:
            warnings.warn(
                f"not converged after {found.iterations} iterations: the gradient is "
                f"{found.slope:.3g}. Raise max_iter or tol, or scale the columns.",
                ConvergenceWarning,
                stacklevel=2,
            )
        self._keep(found.weights)
        return self

    def _minimise(self, objective: _Objective) -> _Minimum:
        solver = self.solver
        if solver == "auto":
            small = objective.size <= _NEWTON_PARAMETERS
            solver = "newton" if small else "lbfgs"
        method = _newton if solver == "newton" else _lbfgs
        return method(objective, self.tol, self.max_iter)

    def _keep(self, weights: Array) -> None:
        if len(self.classes_) == 2:
            # Of the two rows only their difference matters, and the penalty makes them opposite.
            weights = weights[:, 1:] - weights[:, :1]
        self.coef_ = np.ascontiguousarray(weights[:-1].T)
        self.intercept_ = weights[-1].copy()

    def decision_function(self, X: Any) -> Array:
        """The score of the second class, or with more than two classes, that of each."""
        found: Array = self._by_rows(X, lambda rows: rows @ self.coef_.T + self.intercept_)
        return found[:, 0] if found.shape[1] == 1 else found

    def predict_proba(self, X: Any) -> Array:
        """The probability of each class."""
        return np.exp(self.predict_log_proba(X))

    def predict_log_proba(self, X: Any) -> Array:
        scores = self.decision_function(X)
        if scores.ndim == 1:
            return np.stack([-np.logaddexp(0, scores), -np.logaddexp(0, -scores)], axis=1)
        found: Array = scores - logsumexp(scores, axis=1, keepdims=True)
        return found

    def predict(self, X: Any) -> npt.NDArray[Any]:
        """The class of each row."""
        scores = self.decision_function(X)
        places = (scores > 0).astype(int) if scores.ndim == 1 else scores.argmax(axis=1)
        found: npt.NDArray[Any] = self.classes_[places]
        return found


class _Minimum(NamedTuple):
    weights: Array
    iterations: int
    slope: float  # the largest part of the gradient
    converged: bool


class _Objective:
    """The mean loss with its penalty: means, so that `tol` does not depend on the rows.

    With two classes scikit-learn penalises one row of coefficients w. Here there are two, of ±w/2:
    their squares are half as large, so the penalty counts twice.
    """

    def __init__(
        self,
        placed: Placed,
        classes: int,
        C: float,
        intercept: bool,
    ) -> None:
        self._placed = placed
        self._classes = classes
        self._intercept = intercept
        self.shape = (placed.source.columns + 1, classes)
        self.size = self.shape[0] * self.shape[1]
        self._penalty = 0.0 if np.isinf(C) else (2.0 if classes == 2 else 1.0) / C

    def at(self, weights: Array, *, curvature: bool) -> tuple[float, Array, Array | None]:
        job = SoftmaxSum(self._classes, intercept=self._intercept, curvature=curvature)
        found = self._placed.sum(job, weights)
        total = float(found["weight"])
        penalised = weights.copy()
        penalised[-1] = 0.0
        loss = (float(found["loss"]) + 0.5 * self._penalty * float((penalised**2).sum())) / total
        gradient = (found["gradient"] + self._penalty * penalised) / total
        if not curvature:
            return loss, gradient, None
        second = found["curvature"].reshape(self.size, self.size) / total
        diagonal = np.full(self.shape, self._penalty / total)
        diagonal[-1] = 0.0
        return loss, gradient, second + np.diag(diagonal.ravel())


def _newton(objective: _Objective, tolerance: float, most: int) -> _Minimum:
    """With steps that are halved until the loss falls enough."""
    weights = np.zeros(objective.shape)
    loss, gradient, second = objective.at(weights, curvature=True)
    for iteration in range(1, most + 1):
        slope = float(np.abs(gradient).max())
        if slope <= tolerance:
            return _Minimum(weights, iteration - 1, slope, True)
        assert second is not None
        # Singular without a penalty, and along a common shift of all intercepts.
        step = -(linalg.pinvh(second) @ gradient.ravel()).reshape(objective.shape)
        expected = float((gradient * step).sum())
        length = 1.0
        while True:
            tried = weights + length * step
            new = objective.at(tried, curvature=True)
            if new[0] <= loss + 1e-4 * length * expected + 1e-15 * abs(loss) or length < 1e-10:
                break
            length /= 2
        weights, (loss, gradient, second) = tried, new
    slope = float(np.abs(gradient).max())
    return _Minimum(weights, most, slope, slope <= tolerance)


def _lbfgs(objective: _Objective, tolerance: float, most: int) -> _Minimum:
    def value(flat: Array) -> tuple[float, Array]:
        loss, gradient, _ = objective.at(flat.reshape(objective.shape), curvature=False)
        return loss, gradient.ravel()

    found = optimize.minimize(
        value,
        np.zeros(objective.size),
        jac=True,
        method="L-BFGS-B",
        options={"maxiter": most, "gtol": tolerance, "ftol": 0.0, "maxls": 50},
    )
    slope = float(np.abs(found.jac).max())
    # A line search that cannot get any lower has met the limit of the numbers, not of `most`.
    ended = found.status == 0 or (found.status == 2 and slope <= 1e3 * tolerance)
    return _Minimum(found.x.reshape(objective.shape), int(found.nit), slope, bool(ended))
