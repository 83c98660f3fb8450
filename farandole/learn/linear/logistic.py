"""Logistic regression: each step of Newton's method or of L-BFGS is one sum over the data."""

from __future__ import annotations

from typing import Any, Self

import numpy as np
import numpy.typing as npt
from scipy import linalg
from scipy.special import logsumexp
from sklearn.base import ClassifierMixin

from farandole.learn.estimators.base import SumEstimator
from farandole.learn.estimators.classes import encoded, require_two
from farandole.learn.linear.minimise import minimise, require_solver, warn_unless_converged
from farandole.learn.linear.moments import Array
from farandole.learn.linear.softmax import SigmoidSum, SoftmaxSum
from farandole.learn.pools.base import Placed
from farandole.learn.sums.sum import Sum


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
        require_solver(self.solver)
        self.classes_, places = encoded(y, type(self).__name__)
        with self._placed(X, places, sample_weight) as placed:
            require_two(self.classes_)
            objective = _Objective(placed, len(self.classes_), self.C, self.fit_intercept)
            start = np.zeros(objective.shape)
            found = minimise(objective, start, self.solver, self.tol, self.max_iter)
        self.n_iter_ = np.array([found.iterations])
        warn_unless_converged(found)
        self._keep(found.weights)
        return self

    def _keep(self, weights: Array) -> None:
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


class _Objective:
    """The mean loss with its penalty: means, so that `tol` does not depend on the rows."""

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
        self.shape = (placed.source.columns + 1, 1 if classes == 2 else classes)
        self.size = self.shape[0] * self.shape[1]
        self.curvature_size = self.size
        self._penalty = 0.0 if np.isinf(C) else 1.0 / C

    def at(self, weights: Array, *, curvature: bool) -> tuple[float, Array, Array | None]:
        found = self._placed.sum(self._job(curvature), weights)
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

    def _job(self, curvature: bool) -> Sum:
        if self._classes == 2:
            return SigmoidSum(intercept=self._intercept, curvature=curvature)
        return SoftmaxSum(self._classes, intercept=self._intercept, curvature=curvature)

    def step(self, gradient: Array, second: Array) -> Array:
        # Singular without a penalty, and along a common shift of all intercepts.
        found: Array = -(linalg.pinvh(second) @ gradient.ravel()).reshape(self.shape)
        return found
