"""Networks with scikit-learn's loss, from its own start."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import sklearn.neural_network
from scipy.optimize import check_grad
from sklearn.datasets import load_diabetes, load_iris
from sklearn.exceptions import ConvergenceWarning
from sklearn.preprocessing import scale

from farandole.learn import MLPClassifier, MLPRegressor
from farandole.learn.neural.backpropagation import BackpropagationSum
from farandole.learn.sources.chunk import Chunk

X, Y = load_iris(return_X_y=True)
X = scale(X)


@pytest.mark.parametrize("activation", ["identity", "logistic", "tanh", "relu"])
@pytest.mark.parametrize("loss", ["squared", "binary", "classes"])
def test_gradients(activation: str, loss: str) -> None:
    random = np.random.default_rng(0)
    outputs = {"squared": 2, "binary": 1, "classes": 3}[loss]
    y = random.normal(size=(9, 2)) if loss == "squared" else random.integers(0, max(2, outputs), 9)
    chunk = Chunk(random.normal(size=(9, 4)), y, random.random(9), 0, 0)
    job = BackpropagationSum((4, 5, 3, outputs), activation, loss)
    start = random.normal(size=4 * 5 + 5 + 5 * 3 + 3 + 3 * outputs + outputs)
    error = check_grad(
        lambda flat: float(job.map(chunk, flat)["loss"]),
        lambda flat: job.map(chunk, flat)["gradient"],
        start,
    )
    assert error < 1e-5


def quietly(estimator: Any, *data: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        return estimator.fit(*data)


@pytest.mark.parametrize("classes", [2, 3])
@pytest.mark.parametrize("weighted", [False, True])
def test_classification(classes: int, weighted: bool) -> None:
    chosen = classes > Y
    rows, labels = X[chosen], np.array(["a", "b", "c"])[Y[chosen]]
    weights = np.random.default_rng(0).integers(1, 4, len(rows)).astype(float) if weighted else None
    options: dict[str, Any] = {
        "hidden_layer_sizes": (6,),
        "activation": "tanh",
        "alpha": 1.0,
        "random_state": 0,
        "max_iter": 2000,
    }
    ours = MLPClassifier(chunk_rows=20, tol=1e-7, **options).fit(rows, labels, weights)
    theirs = sklearn.neural_network.MLPClassifier(
        solver="lbfgs", tol=1e-7, max_fun=50_000, **options
    )
    quietly(theirs, rows, labels, weights)
    assert ours.loss_ <= 1.001 * theirs.loss_
    assert (ours.predict(rows) == theirs.predict(rows)).mean() > 0.97
    # The same network: scikit-learn's own outputs for our coefficients.
    theirs.coefs_, theirs.intercepts_ = ours.coefs_, ours.intercepts_
    np.testing.assert_allclose(ours.predict_proba(rows), theirs.predict_proba(rows), atol=1e-9)


def test_regression() -> None:
    rows, y = load_diabetes(return_X_y=True)
    rows, y = scale(rows)[:150], scale(y)[:150]
    options: dict[str, Any] = {
        "hidden_layer_sizes": (4,),
        "alpha": 5.0,
        "random_state": 1,
        "max_iter": 3000,
    }
    ours = quietly(MLPRegressor(activation="logistic", chunk_rows=40, tol=1e-7, **options), rows, y)
    theirs = sklearn.neural_network.MLPRegressor(
        solver="lbfgs", activation="logistic", tol=1e-7, max_fun=50_000, **options
    )
    quietly(theirs, rows, y)
    assert ours.loss_ <= 1.001 * theirs.loss_
    two = quietly(MLPRegressor((3,), random_state=0, max_iter=20), rows, np.stack([y, -y], axis=1))
    assert two.predict(rows).shape == (150, 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hidden_layer_sizes": (0,)}, "hidden_layer_sizes"),
        ({"activation": "gelu"}, "activation='gelu'"),
        ({"alpha": -1}, "alpha=-1"),
        ({"max_iter": 0}, "max_iter=0"),
    ],
)
def test_refused(options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MLPClassifier(**options).fit(X, Y)


def test_too_few_iterations_are_said() -> None:
    with pytest.warns(ConvergenceWarning, match="not converged after 1 iteration"):
        MLPClassifier((3,), max_iter=1, random_state=0).fit(X, Y)
