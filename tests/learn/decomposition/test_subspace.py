"""Leading directions: exact for few columns, and for many as good as scikit-learn's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.sparse
import sklearn.decomposition
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.datasets import load_digits

from farandole.learn import PCA, TruncatedSVD

DIGITS = load_digits().data[:500]


@pytest.mark.parametrize("kind", [np.asarray, scipy.sparse.csr_array])
def test_truncated_svd(kind: Any) -> None:
    ours = TruncatedSVD(8, random_state=0, chunk_rows=60).fit(kind(DIGITS))
    exact = sklearn.decomposition.TruncatedSVD(8, algorithm="arpack").fit(DIGITS)
    np.testing.assert_allclose(ours.singular_values_, exact.singular_values_, rtol=1e-4)
    np.testing.assert_allclose(ours.explained_variance_, exact.explained_variance_, rtol=1e-3)
    np.testing.assert_allclose(
        ours.explained_variance_ratio_, exact.explained_variance_ratio_, rtol=1e-3
    )
    found, wanted = ours.transform(kind(DIGITS)), exact.transform(DIGITS)
    np.testing.assert_allclose(np.abs(found[:, :4]), np.abs(wanted[:, :4]), atol=0.05)
    back = np.linalg.norm(DIGITS - ours.inverse_transform(found))
    best = np.linalg.norm(DIGITS - exact.inverse_transform(wanted))
    assert back <= 1.001 * best


@pytest.mark.parametrize("kind", [np.asarray, scipy.sparse.csr_array])
@pytest.mark.parametrize("whiten", [False, True])
def test_randomised_pca(kind: Any, whiten: bool) -> None:
    X = DIGITS + (1e3 if kind is np.asarray else 0)  # far from zero: the mean is subtracted first
    ours = PCA(6, svd_solver="randomized", whiten=whiten, random_state=1, chunk_rows=60)
    ours.fit(kind(X))
    exact = sklearn.decomposition.PCA(6, whiten=whiten, svd_solver="full").fit(X)
    for name in ("explained_variance_", "explained_variance_ratio_", "noise_variance_", "mean_"):
        np.testing.assert_allclose(getattr(ours, name), getattr(exact, name), rtol=1e-3)
    found, wanted = ours.transform(kind(X)), exact.transform(X)
    assert np.linalg.norm(X - ours.inverse_transform(found)) <= 1.001 * np.linalg.norm(
        X - exact.inverse_transform(wanted)
    )


@settings(deadline=None, max_examples=30)
@given(st.integers(2, 30), st.integers(1, 8), st.integers(0, 1000), st.booleans())
def test_few_columns_are_exact(rows: int, columns: int, seed: int, constant: bool) -> None:
    X = np.random.default_rng(seed).normal(size=(rows, columns)).astype(np.float32)
    if constant:
        X[:, -1] = 4
    ours = TruncatedSVD(columns, chunk_rows=7, random_state=seed).fit(X)
    values = np.zeros(columns)
    exact = np.linalg.svd(X.astype(float), compute_uv=False)
    values[: len(exact)] = exact
    np.testing.assert_allclose(ours.singular_values_, values, atol=1e-6 * values[0], rtol=1e-6)


def test_wide_data_take_the_randomised_solver() -> None:
    X = np.random.default_rng(0).normal(size=(20, 1000)) * np.r_[np.full(3, 50.0), np.ones(997)]
    found = PCA(3, random_state=0, chunk_rows=6).fit(X)
    assert found.n_passes_ == 7
    exact = sklearn.decomposition.PCA(3, svd_solver="full").fit(X)
    np.testing.assert_allclose(found.explained_variance_, exact.explained_variance_, rtol=1e-6)


@pytest.mark.parametrize(
    ("estimator", "message"),
    [
        (TruncatedSVD(4), "n_components=4 must be <= n_features=3"),
        (TruncatedSVD(n_iter=-1), "n_iter=-1"),
        (PCA(svd_solver="fast"), "svd_solver='fast'"),
        (PCA(0.9, svd_solver="randomized"), "n_components=0.9 with svd_solver='randomized'"),
        (PCA(4, svd_solver="randomized"), "n_components=4 must be between 1 and .*=3"),
    ],
)
def test_refused(estimator: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        estimator.fit(np.eye(3))
