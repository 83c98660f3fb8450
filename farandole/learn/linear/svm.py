"""A linear support vector machine with the squared hinge, which has a gradient that is a sum."""

from __future__ import annotations

from typing import Any, Self

import numpy as np
import numpy.typing as npt
from sklearn.base import ClassifierMixin

from farandole.learn.estimators.base import SumEstimator
from farandole.learn.estimators.classes import encoded, require_two
from farandole.learn.linear.hinge import HingeSum
from farandole.learn.linear.minimise import minimise, require_solver, warn_unless_converged
from farandole.learn.linear.moments import Array
from farandole.learn.pools.base import Placed


class LinearSVC(ClassifierMixin, SumEstimator):
    """Minimises, as scikit-learn's does, ½ ‖w‖² + C · the sum of max(0, 1 − y f(x))².

    Of more than two classes each is told from all others. As in scikit-learn, the intercept is the
    weight of a column that is `intercept_scaling` everywhere, and is penalised with the others.
    solver: "newton" (few columns), "lbfgs", or "auto".
    """

    def __init__(
        self,
        *,
        C: float = 1.0,
        fit_intercept: bool = True,
        intercept_scaling: float = 1.0,
        solver: str = "auto",
        max_iter: int = 100,
        tol: float = 1e-8,
        pool: Any = None,
        chunk_rows: int = 0,
    ) -> None:
        self.C = C
        self.fit_intercept = fit_intercept
        self.intercept_scaling = intercept_scaling
        self.solver = solver
        self.max_iter = max_iter
        self.tol = tol
        self.pool = pool
        self.chunk_rows = chunk_rows

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Of X (rows × columns) and the labels y."""
        if not 0 < self.C < np.inf:
            raise ValueError(f"C={self.C!r}: it is above 0, and finite.")
        if self.fit_intercept and not self.intercept_scaling > 0:
            raise ValueError(
                f"intercept_scaling={self.intercept_scaling!r}: it is above 0 with fit_intercept."
            )
        require_solver(self.solver)
        self.classes_, places = encoded(y, type(self).__name__)
        with self._placed(X, places, sample_weight) as placed:
            require_two(self.classes_)
            scale = float(self.intercept_scaling) if self.fit_intercept else 0.0
            objective = _Objective(placed, len(self.classes_), self.C, scale)
            start = np.zeros(objective.shape)
            found = minimise(objective, start, self.solver, self.tol, self.max_iter)
        self.n_iter_ = found.iterations
        warn_unless_converged(found)
        self.coef_ = np.ascontiguousarray(found.weights[:-1].T)
        self.intercept_ = scale * found.weights[-1]
        return self

    def decision_function(self, X: Any) -> Array:
        """The score of the second class, or with more than two classes, that of each."""
        found: Array = self._by_rows(X, lambda rows: rows @ self.coef_.T + self.intercept_)
        return found[:, 0] if found.shape[1] == 1 else found

    def predict(self, X: Any) -> npt.NDArray[Any]:
        """The class of each row."""
        scores = self.decision_function(X)
        places = (scores > 0).astype(int) if scores.ndim == 1 else scores.argmax(axis=1)
        found: npt.NDArray[Any] = self.classes_[places]
        return found


class _Objective:
    """Divided by C and the weight of the rows, so that `tol` depends on neither."""

    def __init__(self, placed: Placed, classes: int, C: float, scale: float) -> None:
        self._placed = placed
        self._scale = scale
        self._penalty = 1 / C
        self.shape = (placed.source.columns + 1, 1 if classes == 2 else classes)
        self.curvature_size = self.shape[0]

    def at(self, weights: Array, *, curvature: bool) -> tuple[float, Array, Array | None]:
        job = HingeSum(self.shape[1], self._scale, curvature)
        found = self._placed.sum(job, weights)
        total = float(found["weight"])
        loss = (float(found["loss"]) + 0.5 * self._penalty * float((weights**2).sum())) / total
        gradient = (found["gradient"] + self._penalty * weights) / total
        if not curvature:
            return loss, gradient, None
        second: Array = (found["curvature"] + self._penalty * np.eye(self.shape[0])) / total
        return loss, gradient, second

    def step(self, gradient: Array, second: Array) -> Array:
        """Each classifier is a problem of its own. The penalty makes all of them regular."""
        steps = np.linalg.solve(second, gradient.T[:, :, None])[:, :, 0]
        return -np.ascontiguousarray(steps.T)
