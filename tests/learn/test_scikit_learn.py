"""scikit-learn's own checks of estimators, and its own results."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import sklearn.decomposition
import sklearn.linear_model
import sklearn.naive_bayes
from sklearn.base import BaseEstimator
from sklearn.utils.estimator_checks import estimator_checks_generator

import farandole.learn as learn

# Those that do not apply, with the reason.
NOT_APPLICABLE = {
    "KMeans": {
        f"check_sample_weight_equivalence_on_{kind}_data": "the start is drawn by row, so that "
        "repeating a row draws another one; scikit-learn's own is excused for the same reason"
        for kind in ("dense", "sparse")
    }
}


def checks() -> list[Any]:
    found = []
    for name in learn.__all__:
        estimator = getattr(learn, name)()
        excused = NOT_APPLICABLE.get(name, {})
        for each, check in estimator_checks_generator(estimator, legacy=True):
            check_name = getattr(check, "func", check).__name__
            if check_name not in excused:
                found.append(pytest.param(each, check, id=f"{name}-{check_name}"))
    return found


@pytest.mark.filterwarnings("ignore")
def test_checks_of_estimators(subtests: Any) -> None:
    """In one test: the checks are hundreds, and a few milliseconds each."""
    for parameter in checks():
        with subtests.test(parameter.id):
            estimator, check = parameter.values
            check(estimator)


def test_what_does_not_apply_is_there() -> None:
    for name, excused in NOT_APPLICABLE.items():
        known = {
            getattr(check, "func", check).__name__
            for _, check in estimator_checks_generator(getattr(learn, name)(), legacy=True)
        }
        assert excused.keys() <= known


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


@pytest.mark.parametrize("name", learn.__all__)
def test_sparse_rows_give_what_dense_ones_do(name: str) -> None:
    import scipy.sparse

    X, y, labels, _ = made(90, 4, seed=4)
    X = np.where(np.abs(X) > 3, np.abs(X), 0)
    kind = getattr(learn, name)
    target = y if name in {"LinearRegression", "Ridge", "Lasso", "ElasticNet"} else labels
    options = {"random_state": 0, "n_clusters": 3} if name == "KMeans" else {}
    dense = kind(chunk_rows=20, **options).fit(X, target)
    sparse = kind(chunk_rows=20, **options)
    if name == "GaussianNB":
        with pytest.raises(TypeError, match=r"[Ss]parse"):
            sparse.fit(scipy.sparse.csr_array(X), target)
        return
    sparse.fit(scipy.sparse.csr_array(X), target)
    method = "transform" if name == "PCA" else "predict"
    found = getattr(sparse, method)(scipy.sparse.csr_array(X))
    np.testing.assert_allclose(found, getattr(dense, method)(X), rtol=1e-7, atol=1e-7)
