"""What is wrong with the data is said with scikit-learn's exceptions, and where it is."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import linalg
from sklearn.exceptions import ConvergenceWarning

from farandole.learn import (
    PCA,
    ElasticNet,
    GaussianNB,
    KMeans,
    Lasso,
    LinearRegression,
    LogisticRegression,
    MultinomialNB,
    Ridge,
)

random = np.random.default_rng(0)
X = random.normal(size=(60, 3))
Y = X @ [1.0, -2.0, 0.5] + 1


@pytest.mark.parametrize(
    ("estimator", "rows", "target", "message"),
    [
        (KMeans(9), X[:4], None, "n_samples=4 should be >= n_clusters=9"),
        (KMeans(2, init="random"), X, None, "init='random'"),
        (KMeans(2, init=np.zeros((3, 3))), X, None, r"shape \(3, 3\), and needs \(2, 3\)"),
        (KMeans(0), X, None, "n_clusters=0"),
        (PCA(4), X, None, "n_components=4 must be between 1 and .*=3"),
        (PCA(), X[:1], None, "minimum of 2 is required"),
        (Ridge(-1.0), X, Y, "alpha=-1.0"),
        (Lasso(-1.0), X, Y, "alpha=-1.0"),
        (ElasticNet(l1_ratio=2), X, Y, "l1_ratio=2"),
        (LinearRegression(), X, Y[:9], "X has 60 rows, and y has 9"),
        (LinearRegression(), X, None, "requires y to be passed"),
        (LogisticRegression(C=0), X, Y > 0, "C=0"),
        (LogisticRegression(solver="sag"), X, Y > 0, "solver='sag'"),
        (LogisticRegression(), X, np.zeros(60, int), "at least 2 classes"),
        (MultinomialNB(), X, Y > 0, "Negative values"),
        (MultinomialNB(alpha=-1), np.abs(X), Y > 0, "alpha=-1"),
        (GaussianNB(priors=[0.5, 0.6]), X, Y > 0, "sum of the priors should be 1"),
        (GaussianNB(priors=[1.0]), X, Y > 0, "Number of priors"),
    ],
    ids=lambda each: str(each)[:30] if isinstance(each, str) else None,
)
def test_refused(estimator: Any, rows: np.ndarray, target: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        estimator.fit(rows, target)


def test_weights_that_are_all_zero() -> None:
    zero = np.zeros(60)
    for estimator in (LinearRegression(), LogisticRegression(), GaussianNB()):
        with pytest.raises(ValueError, match="at least one non-zero"):
            estimator.fit(X, Y > 0, zero)


def test_weights_below_zero() -> None:
    below = np.r_[-1.0, np.ones(59)]
    for estimator in (LinearRegression(), LogisticRegression(), GaussianNB(), KMeans(2)):
        with pytest.raises(ValueError, match=r"[Nn]egative values"):
            estimator.fit(X, Y > 0, sample_weight=below)


def test_the_place_of_what_is_not_finite() -> None:
    rows = X.copy()
    rows[41, 1] = np.inf
    for estimator in (LinearRegression(chunk_rows=10), KMeans(2, chunk_rows=10)):
        with pytest.raises(ValueError, match=r"row 41, column 1 is inf \(chunk 4, its row 1\)"):
            estimator.fit(rows, Y)


def test_labels_that_were_not_announced() -> None:
    model = GaussianNB().partial_fit(X, Y > 0, [False, True])
    with pytest.raises(ValueError, match=r"not among the classes.*\[2\]"):
        model.partial_fit(X, np.full(60, 2))
    with pytest.raises(ValueError, match="classes must be passed on the first call"):
        GaussianNB().partial_fit(X, Y > 0)


def test_a_singular_system_has_the_solution_of_least_norm_and_a_warning() -> None:
    twice = np.hstack([X, X[:, :1]])
    with pytest.warns(linalg.LinAlgWarning, match="3 of 4 columns are independent"):
        found = LinearRegression(chunk_rows=7).fit(twice, Y)
    np.testing.assert_allclose(found.coef_, [0.5, -2.0, 0.5, 0.5], atol=1e-9)


def test_constant_columns() -> None:
    rows = np.hstack([X, np.full((60, 1), 7.0)])
    with pytest.warns(linalg.LinAlgWarning):
        found = LinearRegression().fit(rows, Y)
    np.testing.assert_allclose(found.coef_, [1.0, -2.0, 0.5, 0.0], atol=1e-9)
    assert Lasso(0.01).fit(rows, Y).coef_[3] == 0


def test_columns_far_from_zero_lose_no_digits() -> None:
    """Sums of squares would: 10⁸ squared has no digit left for a variance of 1."""
    far = X + 1e8
    found = LinearRegression(chunk_rows=7).fit(far, Y)
    np.testing.assert_allclose(found.coef_, [1.0, -2.0, 0.5], rtol=1e-6)


def test_too_few_iterations_are_said() -> None:
    for estimator in (
        Lasso(0.001, max_iter=1, tol=1e-14),
        LogisticRegression(max_iter=1),
        LogisticRegression(max_iter=1, solver="lbfgs"),
        KMeans(5, max_iter=1, tol=0, random_state=0),
    ):
        with pytest.warns(ConvergenceWarning, match="not converged after 1 iteration"):
            estimator.fit(X, Y if isinstance(estimator, Lasso) else Y > 0)


def test_rows_that_are_all_equal() -> None:
    with pytest.warns(ConvergenceWarning, match=r"distinct clusters \(1\) found smaller than"):
        found = KMeans(3, random_state=0).fit(np.ones((20, 2)))
    assert found.inertia_ == 0


def test_tensors_and_memory_maps(tmp_path: Path) -> None:
    np.save(tmp_path / "X.npy", X.astype(np.float32))
    mapped = np.load(tmp_path / "X.npy", mmap_mode="r")
    expected = PCA(2, chunk_rows=9).fit(X.astype(np.float32))
    for rows in (torch.tensor(X, dtype=torch.float32), mapped):
        found = PCA(2, chunk_rows=9).fit(rows)
        assert np.array_equal(found.components_, expected.components_)
        assert found.n_features_in_ == 3
    with pytest.raises(ValueError, match="X has 2 features, but PCA is expecting 3"):
        expected.transform(np.load(tmp_path / "X.npy", mmap_mode="r")[:, :2])
    with pytest.raises(ValueError, match=r"2D array, got one of shape \(3,\)"):
        PCA().fit(mapped[0])


def test_no_warning_where_nothing_is_wrong() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        LinearRegression().fit(X, Y)
        Lasso(0.1).fit(X, Y)
        LogisticRegression().fit(X, Y > 0)
        KMeans(3, random_state=0).fit(X)
