"""Every estimator agrees with scikit-learn's on tables of any shape, also with one row, with
constant columns, with chunks of zeros only, as sparse rows, and far from zero.

Those that begin at random are compared where there is one answer: with one component, with the same
start, without hidden layers, or with clusters that nobody can mistake.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import scipy.sparse
import sklearn.cluster
import sklearn.decomposition
import sklearn.linear_model
import sklearn.mixture
import sklearn.naive_bayes
import sklearn.neural_network
import sklearn.svm
import sklearn.tree
from hypothesis import given, settings
from hypothesis import strategies as st

import farandole.learn as learn

pytestmark = pytest.mark.filterwarnings("ignore")  # singular systems, documents without words


@dataclass(frozen=True)
class Table:
    X: np.ndarray
    y: np.ndarray
    labels: np.ndarray  # at least two classes where there are two rows
    chunk_rows: int
    sparse: bool

    @property
    def rows(self) -> Any:
        """As an estimator is given them."""
        return scipy.sparse.csr_array(self.X) if self.sparse else self.X


@st.composite
def tables(draw: st.DrawFn, least: int = 1) -> Table:
    rows, columns = draw(st.integers(least, 30)), draw(st.integers(1, 5))
    random = np.random.default_rng(draw(st.integers(0, 2**16)))
    X = random.normal(size=(rows, columns))
    sparse = draw(st.booleans())
    if sparse:
        X[random.random(X.shape) < 0.5] = 0.0
        X[: rows // 3] = 0.0  # whole chunks of them
    else:
        X += draw(st.sampled_from([0.0, 100.0]))
    if columns > 1 and draw(st.booleans()):
        X[:, 0] = 1.5
    y = X.sum(axis=1) + random.normal(size=rows)
    labels = random.integers(0, draw(st.integers(2, 3)), size=rows)
    labels[:2] = [0, 1][:rows]
    return Table(X, y, labels, draw(st.integers(1, rows + 2)), sparse)


few = settings(max_examples=12, derandomize=True)


def close(found: Any, wanted: Any, relative: float = 1e-6) -> None:
    wanted = np.asarray(wanted)
    scale = np.abs(wanted).max(initial=1e-3)
    np.testing.assert_allclose(found, wanted, rtol=relative, atol=relative * scale)


@few
@given(tables())
def test_least_squares(table: Table) -> None:
    models = sklearn.linear_model
    for ours, theirs in (
        (learn.LinearRegression(), models.LinearRegression()),
        (learn.Ridge(0.5), models.Ridge(0.5, solver="svd")),
    ):
        ours.set_params(chunk_rows=table.chunk_rows).fit(table.rows, table.y)
        wanted = theirs.fit(table.X, table.y).predict(table.X)
        close(ours.predict(table.rows), wanted)


@few
@given(tables())
def test_penalised(table: Table) -> None:
    def objective(model: Any) -> float:
        error = table.y - table.X @ model.coef_ - model.intercept_
        sizes = 0.5 * np.abs(model.coef_).sum() + 0.25 * np.square(model.coef_).sum()
        lasso = np.abs(model.coef_).sum()
        penalty = lasso if isinstance(model, Lassos) else sizes
        return float(np.square(error).mean() / 2 + 0.05 * penalty)

    models = sklearn.linear_model
    Lassos = (learn.Lasso, models.Lasso)
    options: dict[str, Any] = {"tol": 1e-10, "max_iter": 50_000}
    for ours, theirs in (
        (learn.Lasso(0.05, **options), models.Lasso(0.05, **options)),
        (learn.ElasticNet(0.05, **options), models.ElasticNet(0.05, **options)),
    ):
        ours.set_params(chunk_rows=table.chunk_rows).fit(table.rows, table.y)
        wanted = objective(theirs.fit(table.X, table.y))
        assert objective(ours) <= wanted + 1e-6 * max(1.0, wanted)


@few
@given(tables(least=2))
def test_linear_classifiers(table: Table) -> None:
    ours = learn.LogisticRegression(chunk_rows=table.chunk_rows).fit(table.rows, table.labels)
    theirs = sklearn.linear_model.LogisticRegression(tol=1e-10, max_iter=20_000)
    theirs.fit(table.X - table.X.mean(axis=0), table.labels)  # it converges only near zero
    wanted = theirs.predict_proba(table.X - table.X.mean(axis=0))
    np.testing.assert_allclose(ours.predict_proba(table.rows), wanted, atol=1e-4)
    near = table.X - table.X.mean(axis=0)
    ours_svc = learn.LinearSVC(chunk_rows=table.chunk_rows, max_iter=1000).fit(near, table.labels)
    svc = sklearn.svm.LinearSVC(dual=False, tol=1e-12, max_iter=100_000).fit(near, table.labels)
    close(ours_svc.decision_function(near), svc.decision_function(near), 1e-4)


@few
@given(tables(least=2))
def test_naive_bayes(table: Table) -> None:
    counts = np.floor(np.abs(table.X) * 3)
    kind = scipy.sparse.csr_array if table.sparse else np.asarray
    ours = learn.MultinomialNB(chunk_rows=table.chunk_rows).fit(kind(counts), table.labels)
    theirs = sklearn.naive_bayes.MultinomialNB().fit(counts, table.labels)
    close(ours.predict_joint_log_proba(kind(counts)), theirs.predict_joint_log_proba(counts))
    X = np.hstack([table.X, np.arange(len(table.X))[:, None]])  # one column that is not constant
    gauss = learn.GaussianNB(var_smoothing=1e-3, chunk_rows=table.chunk_rows).fit(X, table.labels)
    wanted = sklearn.naive_bayes.GaussianNB(var_smoothing=1e-3).fit(X, table.labels)
    close(gauss.predict_joint_log_proba(X), wanted.predict_joint_log_proba(X))


@few
@given(tables(), st.sampled_from([np.float32, np.float64]), st.integers(1, 3))
def test_k_means_from_the_same_start(table: Table, dtype: Any, clusters: int) -> None:
    X = table.X.astype(dtype)
    start = np.unique(X, axis=0)[:clusters]
    rows = scipy.sparse.csr_array(X) if table.sparse else X
    options: dict[str, Any] = {"init": start, "n_init": 1, "tol": 0}
    ours = learn.KMeans(len(start), chunk_rows=table.chunk_rows, **options).fit(rows)
    theirs = sklearn.cluster.KMeans(len(start), **options).fit(X.astype(np.float64))
    assert ours.n_iter_ < 300
    assert ours.inertia_ <= 1.001 * theirs.inertia_ + 1e-6
    assert np.array_equal(ours.labels_, ours.predict(rows))
    close(-ours.score(rows), ours.inertia_, 1e-5)


@few
@given(tables(least=2), st.sampled_from(["full", "diag", "spherical"]))
def test_one_gaussian(table: Table, kind: str) -> None:
    options: dict[str, Any] = {"covariance_type": kind, "reg_covar": 1e-3}
    ours = learn.GaussianMixture(1, chunk_rows=table.chunk_rows, **options).fit(table.X)
    theirs = sklearn.mixture.GaussianMixture(1, **options).fit(table.X)
    close(ours.means_, theirs.means_)
    close(ours.covariances_, theirs.covariances_)
    close(ours.score_samples(table.X), theirs.score_samples(table.X), 1e-4)


@few
@given(tables(least=2))
def test_directions(table: Table) -> None:
    ours = learn.PCA(chunk_rows=table.chunk_rows).fit(table.rows)
    theirs = sklearn.decomposition.PCA(svd_solver="full").fit(table.X)
    close(ours.explained_variance_, theirs.explained_variance_)
    close(ours.inverse_transform(ours.transform(table.rows)), table.X)
    count = min(table.X.shape)
    svd = learn.TruncatedSVD(count, random_state=0, chunk_rows=table.chunk_rows).fit(table.rows)
    close(svd.singular_values_, np.linalg.svd(table.X, compute_uv=False)[:count], 1e-5)


@few
@given(st.integers(30, 60), st.integers(1, 3), st.integers(1, 70), st.integers(0, 2**16))
def test_independent_components(rows: int, columns: int, chunk_rows: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    X = random.uniform(-1, 1, (rows, columns)) @ random.normal(size=(columns, columns)) + 7
    options: dict[str, Any] = {"w_init": np.eye(columns), "max_iter": 1000, "tol": 1e-10}
    ours = learn.FastICA(columns, chunk_rows=chunk_rows, **options).fit(X)
    # All components of full rank: what is unmixed and mixed again is the table.
    close(ours.inverse_transform(ours.transform(X)), X)
    theirs = sklearn.decomposition.FastICA(columns, whiten="unit-variance", **options).fit(X)
    close(ours.inverse_transform(ours.transform(X)), theirs.inverse_transform(theirs.transform(X)))
    close(ours.mean_, theirs.mean_)


@few
@given(tables())
def test_first_splits(table: Table) -> None:
    for ours, theirs, y in (
        (learn.DecisionTreeRegressor, sklearn.tree.DecisionTreeRegressor, table.y),
        (learn.DecisionTreeClassifier, sklearn.tree.DecisionTreeClassifier, table.labels),
    ):
        model = ours(max_depth=1, chunk_rows=table.chunk_rows).fit(table.rows, y)
        other = theirs(max_depth=1, random_state=0).fit(table.X, y)
        if ours is learn.DecisionTreeRegressor:
            found, wanted = (np.square(m.predict(table.X) - y).sum() for m in (model, other))
        else:  # Gini's impurity
            found, wanted = (
                (1 - np.square(m.predict_proba(table.X)).sum(axis=1)).sum() for m in (model, other)
            )
        # Of equal splits another may be taken; scikit-learn sees float32.
        assert found <= wanted + 1e-5 * max(1.0, wanted)


@few
@given(tables(least=2))
def test_networks_without_hidden_layers(table: Table) -> None:
    networks = sklearn.neural_network
    near = table.X - table.X.mean(axis=0)
    options: dict[str, Any] = {
        "hidden_layer_sizes": (),
        "alpha": 0.1,
        "tol": 1e-9,
        "max_iter": 5000,
        "random_state": 0,
    }
    regressor = learn.MLPRegressor(chunk_rows=table.chunk_rows, **options).fit(near, table.y)
    wanted = networks.MLPRegressor(solver="lbfgs", **options).fit(near, table.y)
    close(regressor.predict(near), wanted.predict(near), 1e-3)
    ours = learn.MLPClassifier(chunk_rows=table.chunk_rows, **options).fit(near, table.labels)
    theirs = networks.MLPClassifier(solver="lbfgs", **options).fit(near, table.labels)
    np.testing.assert_allclose(ours.predict_proba(near), theirs.predict_proba(near), atol=1e-3)


@few
@given(tables())
def test_one_topic(table: Table) -> None:
    counts = np.floor(np.abs(table.X - table.X.min()) * 2)
    ours = learn.LatentDirichletAllocation(1, random_state=0, chunk_rows=table.chunk_rows)
    theirs = sklearn.decomposition.LatentDirichletAllocation(1, random_state=0).fit(counts)
    ours.fit(scipy.sparse.csr_array(counts) if table.sparse else counts)
    close(ours.components_, theirs.components_)


@few
@given(st.integers(2, 4), st.integers(2, 6), st.integers(1, 30), st.integers(0, 2**16))
def test_clusters_that_lie_apart(clusters: int, each: int, chunk_rows: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    labels = random.permutation(np.repeat(np.arange(clusters), each))
    X = 10.0 * labels[:, None] + random.uniform(-0.5, 0.5, (len(labels), 2))
    found = learn.SpectralClustering(clusters, random_state=0, chunk_rows=chunk_rows).fit(X)
    theirs = sklearn.cluster.SpectralClustering(clusters, random_state=0).fit(X)
    for one in (found, theirs):
        assert len(set(zip(one.labels_.tolist(), labels.tolist(), strict=True))) == clusters


@few
@given(tables(least=2))
def test_planes_about_a_row(table: Table) -> None:
    near = table.X - table.X.mean(axis=0)
    ours = learn.LocallyWeightedRegression(3.0, chunk_rows=table.chunk_rows).fit(near, table.y)
    weights = np.exp(-np.square(near - near[0]).sum(axis=1) / (2 * 3.0**2))
    theirs = sklearn.linear_model.LinearRegression().fit(near, table.y, weights)
    np.testing.assert_allclose(ours.predict(near[:1]), theirs.predict(near[:1]), atol=1e-5)


@few
@given(tables())
def test_descriptions(table: Table) -> None:
    found = learn.describe(table.rows, chunk_rows=table.chunk_rows)
    close(found.mean, table.X.mean(axis=0))
    if len(table.X) > 1:
        close(found.covariance, np.atleast_2d(np.cov(table.X.T)), 1e-9)
        close(found.median, np.median(table.X, axis=0), 1e-9)
