"""Sources that were mixed are found again."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import sklearn.decomposition
from sklearn.exceptions import ConvergenceWarning

from farandole.learn import FastICA

random = np.random.default_rng(0)
time = np.linspace(0, 8, 1500)
SOURCES = np.stack([np.sin(2 * time), np.sign(np.sin(3 * time)), random.laplace(size=1500)], axis=1)
MIXED = SOURCES @ random.normal(size=(3, 3)).T + [5.0, -100.0, 0.0]


def agreement(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """How well each column of `b` is one of `a`, but for its sign."""
    return np.abs(np.corrcoef(a.T, b.T)[: a.shape[1], a.shape[1] :]).max(axis=0)


@pytest.mark.parametrize("fun", ["logcosh", "exp", "cube"])
def test_sources_are_found(fun: str) -> None:
    ours = FastICA(fun=fun, random_state=0, chunk_rows=200, tol=1e-8).fit(MIXED)
    theirs = sklearn.decomposition.FastICA(fun=fun, random_state=0, tol=1e-8).fit(MIXED)
    found = ours.transform(MIXED)
    assert (agreement(found, SOURCES) > 0.98).all()
    assert (agreement(found, theirs.transform(MIXED)) > 1 - 1e-6).all()
    np.testing.assert_allclose(found.std(axis=0), 1, rtol=1e-9)
    np.testing.assert_allclose(ours.inverse_transform(found), MIXED, atol=1e-9)


def test_fewer_components_and_dependent_columns() -> None:
    assert FastICA(2, random_state=0).fit_transform(MIXED).shape == (1500, 2)
    with pytest.warns(UserWarning, match="only 3 columns are independent"):
        found = FastICA(random_state=0).fit(np.hstack([MIXED, MIXED[:, :1]]))
    assert found.components_.shape == (3, 4)


@pytest.mark.parametrize(
    ("options", "X", "message"),
    [
        ({"fun": "tanh"}, MIXED, "fun='tanh'"),
        ({"n_components": 0}, MIXED, "n_components=0"),
        ({"w_init": np.eye(2)}, MIXED, r"shape \(2, 2\), and needs \(3, 3\)"),
        ({}, np.ones((5, 2)), "all rows are equal"),
    ],
)
def test_refused(options: Any, X: np.ndarray, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FastICA(**options).fit(X)


def test_too_few_iterations_are_said() -> None:
    with pytest.warns(ConvergenceWarning, match="not converged after 1 iterations"):
        FastICA(max_iter=1, tol=1e-9, random_state=0).fit(MIXED)
