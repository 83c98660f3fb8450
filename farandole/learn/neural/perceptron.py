"""Small networks, trained on all rows at once: each gradient of L-BFGS is one sum."""

from __future__ import annotations

import itertools
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from scipy.special import expit, softmax
from sklearn.base import ClassifierMixin, MultiOutputMixin, RegressorMixin

from farandole.learn.estimators.base import SumEstimator
from farandole.learn.estimators.classes import encoded
from farandole.learn.estimators.targets import numeric_targets
from farandole.learn.linear.minimise import lbfgs, warn_unless_converged
from farandole.learn.linear.moments import Array
from farandole.learn.neural.backpropagation import (
    ACTIVATIONS,
    BackpropagationSum,
    layers_of,
    outputs_of,
)
from farandole.learn.pools.base import Placed
from farandole.learn.statistics.columns import ColumnSum
from farandole.learn.sums.seed import SeedSum
from farandole.learn.sums.together import Together


class _Perceptron(SumEstimator):
    coefs_: list[Array]
    intercepts_: list[Array]

    def __init__(
        self,
        hidden_layer_sizes: Any = (100,),
        *,
        activation: str = "relu",
        alpha: float = 1e-4,
        max_iter: int = 200,
        max_fun: int = 15_000,
        tol: float = 1e-4,
        random_state: Any = None,
        pool: Any = None,
        chunk_rows: int = 0,
    ) -> None:
        self.hidden_layer_sizes = hidden_layer_sizes
        self.activation = activation
        self.alpha = alpha
        self.max_iter = max_iter
        self.max_fun = max_fun
        self.tol = tol
        self.random_state = random_state
        self.pool = pool
        self.chunk_rows = chunk_rows

    def _train(self, X: Any, y: Any, sample_weight: Any, outputs: int, loss: str) -> None:
        hidden = tuple(int(size) for size in np.atleast_1d(self.hidden_layer_sizes))
        if any(size < 1 for size in hidden):
            raise ValueError(f"hidden_layer_sizes={self.hidden_layer_sizes}: each is 1 or more.")
        if self.activation not in ACTIVATIONS:
            raise ValueError(f"activation={self.activation!r}: known are {ACTIVATIONS}.")
        if not self.alpha >= 0 or self.max_iter < 1 or self.max_fun < 1:
            raise ValueError(
                f"alpha={self.alpha}, max_iter={self.max_iter}, max_fun={self.max_fun}: the first "
                "is 0 or more, the others 1 or more."
            )
        with self._placed(X, y, sample_weight) as placed:
            first = placed.sum(Together(columns=ColumnSum(), seed=SeedSum(self.random_state)))
            sizes = (placed.source.columns, *hidden, outputs)
            job = BackpropagationSum(sizes, self.activation, loss)
            objective = _Objective(placed, job, self.alpha)
            start = _start(sizes, self.activation, first["seed"])
            found = lbfgs(objective, start, self.tol, self.max_iter, self.max_fun)
            self.loss_ = objective.at(found.weights, curvature=False)[0]
        self.n_iter_, self.n_layers_, self.n_outputs_ = found.iterations, len(sizes), outputs
        layers = layers_of(found.weights, sizes)
        self.coefs_ = [coefficients.copy() for coefficients, _ in layers]
        self.intercepts_ = [intercepts.copy() for _, intercepts in layers]
        warn_unless_converged(found, level=4)

    def _scores(self, X: Any) -> Array:
        def work(rows: Any) -> Array:
            layers = list(zip(self.coefs_, self.intercepts_, strict=True))
            return outputs_of(rows, layers, self.activation)[-1]

        found: Array = self._by_rows(X, work)
        return found


class _Objective:
    """The mean loss, and ½ `alpha` times the squared coefficients over the rows, as
    scikit-learn's."""

    def __init__(self, placed: Placed, job: BackpropagationSum, alpha: float) -> None:
        self._placed = placed
        self._job = job
        self._alpha = alpha
        self.curvature_size = 0

    def at(self, weights: Array, *, curvature: bool) -> tuple[float, Array, None]:
        found = self._placed.sum(self._job, weights)
        penalised = weights.copy()
        for _, intercepts in layers_of(penalised, self._job.sizes):
            intercepts[:] = 0.0
        total = float(found["weight"])
        loss = float(found["loss"]) + 0.5 * self._alpha * float(penalised @ penalised)
        return loss / total, (found["gradient"] + self._alpha * penalised) / total, None

    def step(self, gradient: Array, second: Array) -> Array:
        raise NotImplementedError("a network has no second derivatives here")


def _start(sizes: tuple[int, ...], activation: str, seed: int) -> Array:
    """Glorot's, drawn in scikit-learn's order: the same numbers for the same `random_state`."""
    random = np.random.RandomState(seed)
    parts = []
    for inputs, outputs in itertools.pairwise(sizes):
        bound = np.sqrt((2.0 if activation == "logistic" else 6.0) / (inputs + outputs))
        parts.append(random.uniform(-bound, bound, inputs * outputs))
        parts.append(random.uniform(-bound, bound, outputs))
    return np.concatenate(parts)


class MLPClassifier(ClassifierMixin, _Perceptron):
    """A network with the given hidden layers, and logistic or softmax outputs."""

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Of X (rows × columns) and the labels y."""
        self.classes_, places = encoded(y, type(self).__name__)
        outputs = 1 if len(self.classes_) <= 2 else len(self.classes_)
        self._train(X, places, sample_weight, outputs, "binary" if outputs == 1 else "classes")
        return self

    def predict_proba(self, X: Any) -> Array:
        """The probability of each class."""
        scores = self._scores(X)
        if len(self.classes_) == 1:
            return np.ones((len(scores), 1))
        if scores.shape[1] > 1:
            found: Array = softmax(scores, axis=1)
            return found
        return np.hstack([expit(-scores), expit(scores)])

    def predict_log_proba(self, X: Any) -> Array:
        with np.errstate(divide="ignore"):
            return np.log(self.predict_proba(X))

    def predict(self, X: Any) -> npt.NDArray[Any]:
        """The class of each row."""
        places = self.predict_proba(X).argmax(axis=1)
        found: npt.NDArray[Any] = self.classes_[places]
        return found


class MLPRegressor(MultiOutputMixin, RegressorMixin, _Perceptron):
    """A network with the given hidden layers, and outputs as they are."""

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Of X (rows × columns) and y (rows, or rows × targets)."""
        targets = numeric_targets(y, type(self).__name__)
        outputs = 1 if targets.ndim == 1 else targets.shape[1]
        self._flat = targets.ndim == 1 or outputs == 1
        self._train(X, targets, sample_weight, outputs, "squared")
        return self

    def predict(self, X: Any) -> Array:
        """Of each row."""
        scores = self._scores(X)
        return scores[:, 0] if self._flat else scores
