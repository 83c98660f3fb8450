"""The linear support vector machine has scikit-learn's coefficients."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import sklearn.svm
from sklearn.datasets import load_breast_cancer, load_iris
from sklearn.exceptions import ConvergenceWarning
from sklearn.preprocessing import StandardScaler

from farandole.learn import LinearSVC


@pytest.mark.parametrize("solver", ["newton", "lbfgs"])
@pytest.mark.parametrize("intercept", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("load", [load_breast_cancer, load_iris])
def test_coefficients(load: Any, solver: str, intercept: bool, weighted: bool) -> None:
    X, y = load(return_X_y=True)
    X = StandardScaler().fit_transform(X)
    weights = np.random.default_rng(0).integers(0, 3, len(X)).astype(float) if weighted else None
    options: dict[str, Any] = {"C": 0.3, "fit_intercept": intercept, "intercept_scaling": 2.0}
    ours = LinearSVC(solver=solver, chunk_rows=60, max_iter=5000, tol=1e-10, **options)
    ours.fit(X, y, weights)
    theirs = sklearn.svm.LinearSVC(dual=False, tol=1e-13, max_iter=100_000, **options)
    theirs.fit(X, y, weights)
    np.testing.assert_allclose(ours.coef_, theirs.coef_, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(
        ours.intercept_, np.broadcast_to(theirs.intercept_, len(ours.coef_)), atol=1e-6
    )
    assert np.array_equal(ours.predict(X), theirs.predict(X))
    assert ours.decision_function(X).shape == theirs.decision_function(X).shape


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"C": 0}, "C=0"),
        ({"C": np.inf}, "C=inf"),
        ({"solver": "sdca"}, "solver='sdca'"),
        ({"intercept_scaling": 0}, "intercept_scaling=0"),
    ],
)
def test_refused(options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LinearSVC(**options).fit(np.eye(3), [0, 1, 1])


def test_one_class_and_too_few_iterations() -> None:
    with pytest.raises(ValueError, match="at least 2 classes"):
        LinearSVC().fit(np.eye(3), [1, 1, 1])
    X = np.random.default_rng(0).normal(size=(50, 3))
    for solver in ("newton", "lbfgs"):
        with pytest.warns(ConvergenceWarning, match="not converged after 1 iteration"):
            LinearSVC(max_iter=1, tol=1e-14, solver=solver).fit(X, X[:, 0] + 0.3 * X[:, 1] ** 2 > 0)
