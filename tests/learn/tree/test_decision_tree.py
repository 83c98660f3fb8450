"""Trees from histograms: those of scikit-learn where every value has a bin, and near them else."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import sklearn.tree
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.datasets import load_breast_cancer, load_diabetes, load_digits, load_iris

from farandole.learn import DecisionTreeClassifier, DecisionTreeRegressor


def cost(tree: Any) -> float:
    """The weighted impurity of all leaves: what a tree is grown to make small."""
    own = hasattr(tree, "routes")
    left = tree.routes.children_left if own else tree.children_left
    leaves = left == -1
    return float((tree.weighted_n_node_samples * tree.impurity)[leaves].sum())


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("criterion", ["gini", "entropy"])
@pytest.mark.parametrize("load", [load_iris, load_breast_cancer, load_digits])
def test_classification(load: Any, criterion: str, weighted: bool) -> None:
    X, y = load(return_X_y=True)
    X, y = X[:600], y[:600]
    weights = np.random.default_rng(0).integers(0, 3, len(X)) if weighted else None
    options: dict[str, Any] = {"criterion": criterion, "max_depth": 4, "min_samples_leaf": 3}
    ours = DecisionTreeClassifier(max_bins=1024, chunk_rows=100, **options).fit(X, y, weights)
    theirs = sklearn.tree.DecisionTreeClassifier(random_state=0, **options).fit(X, y, weights)
    # Only among equal splits are they free to take different ones.
    assert abs(cost(ours.tree_) - cost(theirs.tree_)) <= 0.01 * cost(theirs.tree_)
    first = [tree.weighted_n_node_samples * tree.impurity for tree in (ours.tree_, theirs.tree_)]
    children = [first[0][1:3], first[1][[1, theirs.tree_.children_right[0]]]]
    np.testing.assert_allclose(children[0].sum(), children[1].sum(), rtol=1e-9)
    assert (ours.predict(X) == theirs.predict(X)).mean() > 0.98
    assert ours.get_depth() == theirs.get_depth()
    np.testing.assert_allclose(ours.predict_proba(X).sum(axis=1), 1)
    np.testing.assert_allclose(ours.feature_importances_.sum(), 1)


@pytest.mark.parametrize("weighted", [False, True])
def test_regression(weighted: bool) -> None:
    X, y = load_diabetes(return_X_y=True)
    weights = np.random.default_rng(0).integers(0, 3, len(X)) if weighted else None
    options: dict[str, Any] = {"max_depth": 5, "min_samples_split": 10}
    ours = DecisionTreeRegressor(max_bins=512, chunk_rows=100, **options).fit(X, y, weights)
    theirs = sklearn.tree.DecisionTreeRegressor(random_state=0, **options).fit(X, y, weights)
    np.testing.assert_allclose(cost(ours.tree_), cost(theirs.tree_), rtol=1e-3)
    # A row without weight may lie between the two sides of a split.
    rows = X if weights is None else X[weights > 0]
    np.testing.assert_allclose(ours.predict(rows), theirs.predict(rows), rtol=1e-9)
    if not weighted:  # with weights two columns have splits that are equally good
        np.testing.assert_allclose(
            ours.feature_importances_, theirs.feature_importances_, rtol=1e-6, atol=1e-9
        )


def test_few_bins_are_nearly_as_good() -> None:
    random = np.random.default_rng(1)
    X = random.normal(size=(3000, 4))
    y = (X[:, 0] + X[:, 1] ** 2 > 1).astype(int)
    ours = DecisionTreeClassifier(max_bins=64, max_depth=5, chunk_rows=250).fit(X, y)
    theirs = sklearn.tree.DecisionTreeClassifier(max_depth=5, random_state=0).fit(X, y)
    assert ours.score(X, y) > theirs.score(X, y) - 0.01


def test_more_open_nodes_than_fit_into_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    X, y = load_digits(return_X_y=True)
    X, y = X[:300], y[:300]
    whole = DecisionTreeClassifier(chunk_rows=100).fit(X, y)
    monkeypatch.setattr("farandole.learn.tree.grow._HISTOGRAM_BYTES", 1 << 18)
    in_parts = DecisionTreeClassifier(chunk_rows=100).fit(X, y)
    assert in_parts.n_passes_ > whole.n_passes_
    assert np.array_equal(in_parts.predict(X), whole.predict(X))
    assert whole.score(X, y) == 1


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 30), st.integers(1, 3), st.integers(0, 2**32 - 1), st.integers(1, 12))
def test_any_shape(rows: int, columns: int, seed: int, chunk_rows: int) -> None:
    random = np.random.default_rng(seed)
    X = random.integers(0, 4, size=(rows, columns)).astype(np.float32)
    X[:, 0] = 7  # a constant column
    y = random.normal(size=rows) + 1e5
    ours = DecisionTreeRegressor(chunk_rows=chunk_rows).fit(X, y)
    means = [y[(row == X).all(axis=1)].mean() for row in X]
    # The rows that differ are told apart, and the others share their mean.
    np.testing.assert_allclose(ours.predict(X), means, rtol=1e-9)
    labels = random.integers(0, 3, size=rows)
    tree = DecisionTreeClassifier(chunk_rows=chunk_rows).fit(X, labels)
    theirs = sklearn.tree.DecisionTreeClassifier(random_state=0).fit(X, labels)
    np.testing.assert_allclose(tree.predict_proba(X), theirs.predict_proba(X), atol=1e-12)


def test_neighbouring_floats_are_told_apart() -> None:
    X = np.array([[1.0], [np.nextafter(1.0, 2.0)]])
    assert DecisionTreeClassifier().fit(X, [0, 1]).score(X, [0, 1]) == 1
    huge = np.array([[-1.7e308], [1.7e308]])
    assert DecisionTreeClassifier().fit(huge, [0, 1]).score(huge, [0, 1]) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"criterion": "best"}, "criterion='best'"),
        ({"max_bins": 1}, "max_bins=1"),
        ({"max_depth": 0}, "max_depth=0"),
        ({"min_samples_leaf": 0}, "min_samples_leaf=0"),
        ({"min_samples_split": 1}, "min_samples_split=1"),
        ({"min_samples_split": 1.5}, "min_samples_split=1.5"),
    ],
)
def test_refused(options: Any, message: str) -> None:
    for kind in (DecisionTreeClassifier, DecisionTreeRegressor):
        with pytest.raises(ValueError, match=message):
            kind(**options).fit(np.eye(3), [0, 1, 1])
