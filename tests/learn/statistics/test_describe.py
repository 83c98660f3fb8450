"""One pass over the columns says what NumPy and SciPy say of the whole."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import scipy.sparse
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from farandole.learn import describe

values = st.floats(-1e6, 1e6).map(lambda x: round(x, 3))
tables = st.tuples(st.integers(1, 40), st.integers(1, 4)).flatmap(
    lambda shape: arrays(np.float64, shape, elements=st.one_of(st.just(7.0), values))
)


@settings(deadline=None, max_examples=60)
@given(tables, st.integers(1, 9), st.booleans())
def test_it_agrees_with_numpy(X: np.ndarray, chunk_rows: int, sparse: bool) -> None:
    found = describe(scipy.sparse.csr_array(X) if sparse else X, chunk_rows=chunk_rows)
    scale = np.abs(X).max() + 1
    assert found.rows == len(X)
    np.testing.assert_allclose(found.mean, X.mean(axis=0), rtol=1e-12, atol=1e-12 * scale)
    assert np.array_equal(found.min, X.min(axis=0))
    assert np.array_equal(found.max, X.max(axis=0))
    assert found.unique.tolist() == [len(np.unique(column)) for column in X.T]
    asked = [0.0, 0.1, 0.25, 0.5, 0.9, 1.0]
    np.testing.assert_allclose(
        found.quantile(asked), np.quantile(X, asked, axis=0), rtol=1e-12, atol=1e-12 * scale
    )
    for column in range(X.shape[1]):
        counts, edges = found.histogram(column, 5)
        expected = np.histogram(X[:, column], 5)
        assert np.array_equal(edges, expected[1])
        assert np.array_equal(counts, expected[0])
    if len(X) > 1:
        np.testing.assert_allclose(
            found.covariance,
            np.cov(X.T).reshape(found.covariance.shape),
            rtol=1e-9,
            atol=1e-9 * scale**2,
        )
        constant = X.min(axis=0) == X.max(axis=0)
        assert np.array_equal(found.variance == 0, constant)
        assert np.isnan(found.skewness[constant]).all()
    else:
        assert np.isnan(found.variance).all()


def test_higher_moments_far_from_zero() -> None:
    X = np.random.default_rng(0).gamma(2.0, size=(5000, 3)) + np.array([0, 1e4, -1e6])
    found = describe(X, chunk_rows=37)
    np.testing.assert_allclose(found.skewness, scipy.stats.skew(X), rtol=1e-6)
    np.testing.assert_allclose(found.kurtosis, scipy.stats.kurtosis(X), rtol=1e-6)
    np.testing.assert_allclose(found.variance, X.var(axis=0, ddof=1), rtol=1e-9)


def test_weights_count_like_repeated_rows() -> None:
    random = np.random.default_rng(1)
    X = random.normal(size=(300, 2))
    weights = random.integers(0, 4, size=300)
    found = describe(X, weights, chunk_rows=29)
    repeated = np.repeat(X, weights, axis=0)
    expected = describe(repeated, chunk_rows=29)
    for name in ("mean", "variance", "skewness", "kurtosis", "covariance"):
        np.testing.assert_allclose(getattr(found, name), getattr(expected, name), rtol=1e-9)
    for name in ("min", "max", "unique"):
        assert np.array_equal(getattr(found, name), getattr(expected, name))
    asked = np.quantile(repeated, [0.2, 0.7], axis=0, method="inverted_cdf")
    assert np.array_equal(found.quantile([0.2, 0.7]), asked)


@pytest.mark.parametrize("kind", ["normal", "heavy", "sorted"])
def test_quantiles_keep_the_error_that_they_state(kind: str) -> None:
    random = np.random.default_rng(2)
    column = random.normal(size=20_000)
    if kind == "heavy":
        column = np.where(random.random(20_000) < 0.3, 0.5, column)
    if kind == "sorted":
        column = np.sort(column)
    found = describe(column[:, None], chunk_rows=500, sketch_size=128)
    error = float(found.quantile_error[0])
    assert 0 < error <= (1 + np.ceil(np.log2(40))) / 128
    ordered = np.sort(column)
    for q in np.linspace(0.01, 0.99, 50):
        value = found.quantile(q)[0]
        low = np.searchsorted(ordered, value, "left") / len(ordered)
        high = np.searchsorted(ordered, value, "right") / len(ordered)
        assert low - error - 1e-4 <= q <= high + error + 1e-4
    counts, edges = found.histogram(0, 20)
    exact = np.histogram(column, edges)[0]
    assert counts.sum() == 20_000
    assert np.abs(counts - exact).max() <= 2 * error * 20_000


def test_few_distinct_values_stay_exact_however_many_rows_there_are() -> None:
    X = np.random.default_rng(3).integers(0, 50, size=(5000, 1))
    found = describe(X, chunk_rows=100, sketch_size=64)
    assert found.quantile_error[0] == 0
    assert found.unique_error[0] == 0
    assert found.unique[0] == len(np.unique(X))


@pytest.mark.parametrize("distinct", [3000, 20_000])
def test_many_distinct_values_are_counted_to_a_few_percent(distinct: int) -> None:
    column = np.repeat(np.random.default_rng(4).normal(size=distinct), 2)
    found = describe(column[:, None], chunk_rows=1000)
    assert abs(found.unique[0] / distinct - 1) < 4 * found.unique_error[0] < 0.07
    assert f"~{found.unique[0]}" in repr(found)


def test_rows_may_come_later() -> None:
    X = np.random.default_rng(5).normal(size=(200, 2))
    whole = describe(X, chunk_rows=50)
    parts = describe(X[:80], chunk_rows=50)
    both = parts.add(X[80:])
    assert parts.rows == 80
    assert both.rows == 200
    for name in ("mean", "variance", "kurtosis", "covariance", "min", "median"):
        np.testing.assert_allclose(getattr(both, name), getattr(whole, name), rtol=1e-9)
    with pytest.raises(ValueError, match=r"X has 3 features, but .* is expecting 2"):
        parts.add(np.zeros((2, 3)))


@pytest.mark.parametrize(
    ("options", "message"),
    [({"sketch_size": 1}, "sketch_size=1"), ({"chunk_rows": -1}, "chunk_rows=-1")],
)
def test_refused(options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        describe(np.zeros((3, 2)), **options)


def test_what_was_not_asked_for_is_said() -> None:
    found = describe(np.eye(3), covariance=False)
    with pytest.raises(ValueError, match="covariance=True"):
        _ = found.covariance
    for q in (-0.1, 1.1, np.nan):
        with pytest.raises(ValueError, match="between 0 and 1"):
            found.quantile(q)
    X = np.eye(4)
    X[2, 1] = np.nan
    with pytest.raises(ValueError, match=r"NaN: row 2, column 1 is nan \(chunk 1, its row 0\)"):
        describe(X, chunk_rows=2)


def test_it_prints_a_table() -> None:
    lines = repr(describe(np.array([[1.0, 5.0], [3.0, 5.0]]))).splitlines()
    assert lines[0] == "2 rows"
    assert lines[1].split() == ["mean", "std", "min", "25%", "50%", "75%", "max", "unique"]
    assert lines[2].split() == ["x0", "2", "1.41421", "1", "1.5", "2", "2.5", "3", "2"]
    assert all(len(a) >= len(b.rstrip()) for a, b in itertools.pairwise(lines[1:]))
