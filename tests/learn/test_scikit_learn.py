"""scikit-learn's own checks of estimators, and its own results."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import numpy as np
import pytest
import scipy.sparse
import sklearn.decomposition
import sklearn.linear_model
import sklearn.naive_bayes
from sklearn.base import BaseEstimator, is_regressor
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils.estimator_checks import estimator_checks_generator

import farandole.learn as learn

ESTIMATORS = [name for name in learn.__all__ if name != "describe"]

# Small, so that the checks are fast.
OPTIONS: dict[str, dict[str, Any]] = {
    "LatentDirichletAllocation": {"max_iter": 3, "n_components": 2, "max_doc_update_iter": 30},
    "MLPClassifier": {"hidden_layer_sizes": (5,), "tol": 1e-2, "max_iter": 50},
    "MLPRegressor": {"hidden_layer_sizes": (5,), "tol": 1e-2, "max_iter": 50},
    "SpectralClustering": {"n_clusters": 2, "n_init": 2},
}

# Those that do not apply, with the reason.
_WEIGHTS = [f"check_sample_weight_equivalence_on_{kind}_data" for kind in ("dense", "sparse")]
NOT_APPLICABLE: dict[str, dict[str, str]] = {
    "KMeans": dict.fromkeys(
        _WEIGHTS,
        "the start is drawn by row, so that repeating a row draws another one; scikit-learn's own "
        "is excused for the same reason",
    ),
}


def made_small(name: str) -> Any:
    return getattr(learn, name)(**OPTIONS.get(name, {}))


def checks(name: str) -> list[tuple[str, Any]]:
    return [
        (getattr(check, "func", check).__name__, partial(check, estimator))
        for estimator, check in estimator_checks_generator(made_small(name), legacy=True)
    ]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ESTIMATORS)
def test_checks_of_estimators(name: str, subtests: Any) -> None:
    """In one test each: the checks are hundreds, and a few milliseconds each."""
    for check_name, check in checks(name):
        if check_name not in NOT_APPLICABLE.get(name, {}):
            with subtests.test(check_name):
                check()


def test_what_does_not_apply_is_there() -> None:
    for name, excused in NOT_APPLICABLE.items():
        assert excused.keys() <= {check_name for check_name, _ in checks(name)}


def made(rows: int, columns: int, seed: int, classes: int = 3) -> tuple[np.ndarray, ...]:
    random = np.random.default_rng(seed)
    X = random.normal(size=(rows, columns)) @ random.normal(size=(columns, columns)) + 3
    scores = (X - 3) @ random.normal(size=(columns, classes)) + random.normal(size=(rows, classes))
    y = X @ random.normal(size=columns) + random.normal(size=rows) + 5
    return X, y, scores.argmax(axis=1), random.integers(0, 4, size=rows).astype(float)


PAIRS: list[tuple[BaseEstimator, BaseEstimator]] = [
    (learn.LinearRegression(), sklearn.linear_model.LinearRegression()),
    (
        learn.LinearRegression(fit_intercept=False),
        sklearn.linear_model.LinearRegression(fit_intercept=False),
    ),
    (learn.Ridge(3.0), sklearn.linear_model.Ridge(3.0)),
    (
        learn.Lasso(0.1, tol=1e-9, max_iter=50_000),
        sklearn.linear_model.Lasso(0.1, tol=1e-12, max_iter=100_000),
    ),
    (
        learn.ElasticNet(0.1, l1_ratio=0.3, fit_intercept=False, tol=1e-9, max_iter=50_000),
        sklearn.linear_model.ElasticNet(
            0.1, l1_ratio=0.3, fit_intercept=False, tol=1e-12, max_iter=100_000
        ),
    ),
]


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(("ours", "theirs"), PAIRS, ids=lambda each: repr(each)[:40])
@pytest.mark.parametrize(("rows", "columns"), [(200, 6), (57, 1), (30, 20)])
def test_regression(ours: Any, theirs: Any, rows: int, columns: int, weighted: bool) -> None:
    X, y, _, weights = made(rows, columns, seed=rows)
    ours.set_params(chunk_rows=13).fit(X, y, weights if weighted else None)
    theirs.fit(X, y, sample_weight=weights if weighted else None)
    scale = np.abs(theirs.coef_).max()
    np.testing.assert_allclose(ours.coef_, theirs.coef_, rtol=1e-6, atol=1e-6 * scale)
    np.testing.assert_allclose(ours.intercept_, theirs.intercept_, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("solver", ["newton", "lbfgs"])
@pytest.mark.parametrize("classes", [2, 4])
@pytest.mark.parametrize("intercept", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_logistic_regression(solver: str, classes: int, intercept: bool, weighted: bool) -> None:
    X, _, labels, weights = made(150, 5, seed=1, classes=classes)
    chosen = weights if weighted else None
    ours = learn.LogisticRegression(
        C=0.7, fit_intercept=intercept, solver=solver, chunk_rows=50, max_iter=2000
    ).fit(X, labels, chosen)
    theirs = sklearn.linear_model.LogisticRegression(
        C=0.7, fit_intercept=intercept, tol=1e-12, max_iter=20_000, solver="newton-cg"
    ).fit(X, labels, chosen)
    np.testing.assert_allclose(ours.coef_, theirs.coef_, rtol=1e-5, atol=1e-5)
    if classes == 2:
        np.testing.assert_allclose(ours.intercept_, theirs.intercept_, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(ours.predict_proba(X), theirs.predict_proba(X), atol=1e-6)


@pytest.mark.parametrize("whiten", [False, True])
@pytest.mark.parametrize("components", [None, 2, 0.9])
@pytest.mark.parametrize(("rows", "columns"), [(200, 6), (5, 8)])
def test_pca(whiten: bool, components: Any, rows: int, columns: int) -> None:
    X = made(rows, columns, seed=2)[0]
    ours = learn.PCA(components, whiten=whiten, chunk_rows=13).fit(X)
    theirs = sklearn.decomposition.PCA(components, whiten=whiten, svd_solver="full").fit(X)
    assert ours.n_components_ == theirs.n_components_
    real = theirs.explained_variance_ > 1e-9 * theirs.explained_variance_[0]
    for name in ("explained_variance_", "explained_variance_ratio_", "singular_values_"):
        found, wanted = getattr(ours, name), getattr(theirs, name)
        np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-6 * wanted[0])
    np.testing.assert_allclose(ours.noise_variance_, theirs.noise_variance_, rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(
        np.abs(ours.transform(X)[:, real]), np.abs(theirs.transform(X)[:, real]), atol=1e-6
    )
    np.testing.assert_allclose(
        ours.inverse_transform(ours.transform(X)),
        theirs.inverse_transform(theirs.transform(X)),
        atol=1e-6,
    )


@pytest.mark.parametrize("weighted", [False, True])
def test_naive_bayes(weighted: bool) -> None:
    X, _, labels, weights = made(150, 5, seed=3)
    chosen = weights if weighted else None
    counts = np.floor(np.abs(X))
    for ours, theirs, rows in (
        (learn.GaussianNB(chunk_rows=17), sklearn.naive_bayes.GaussianNB(), X),
        (learn.MultinomialNB(chunk_rows=17), sklearn.naive_bayes.MultinomialNB(), counts),
    ):
        ours.fit(rows, labels, chosen)
        theirs.fit(rows, labels, chosen)
        np.testing.assert_allclose(
            ours.predict_joint_log_proba(rows), theirs.predict_joint_log_proba(rows), rtol=1e-6
        )
        in_parts = type(ours)()
        for part in (slice(0, 1), slice(1, 80), slice(80, None)):
            some = None if chosen is None else chosen[part]
            in_parts.partial_fit(rows[part], labels[part], np.unique(labels), some)
        np.testing.assert_allclose(
            in_parts.predict_proba(rows), ours.predict_proba(rows), rtol=1e-9
        )


NO_SPARSE = {"GaussianNB", "GaussianMixture", "FastICA"}


@pytest.mark.parametrize("name", ESTIMATORS)
def test_sparse_rows_give_what_dense_ones_do(name: str) -> None:
    X, y, labels, _ = made(90, 4, seed=4)
    X = np.where(np.abs(X) > 3, np.abs(X), 0)
    dense, sparse = made_small(name), made_small(name)
    options = {"chunk_rows": 20} | (
        {"random_state": 0} if "random_state" in dense.get_params() else {}
    )
    if name.startswith("MLP"):
        options["max_iter"] = 3  # before rounding leads to another minimum
    for estimator in (dense, sparse):
        estimator.set_params(**options)
    target = y if is_regressor(dense) else labels
    rows = scipy.sparse.csr_array(X)
    if name in NO_SPARSE:
        with pytest.raises(TypeError, match=r"[Ss]parse"):
            sparse.fit(rows, target)
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        dense.fit(X, target)
        sparse.fit(rows, target)
    if name == "SpectralClustering":
        assert np.array_equal(sparse.labels_, dense.labels_)
        return
    method = "predict" if hasattr(dense, "predict") else "transform"
    found, wanted = getattr(sparse, method)(rows), getattr(dense, method)(X)
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)
