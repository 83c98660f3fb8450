"""Locally weighted regression is a weighted regression about every row asked for."""

from __future__ import annotations

import numpy as np
import pytest
import sklearn.linear_model
from hypothesis import given, settings
from hypothesis import strategies as st

from farandole.learn import LocallyWeightedRegression

random = np.random.default_rng(0)
X = random.uniform(-2, 2, size=(150, 2))
Y = np.sin(2 * X[:, 0]) + X[:, 1] ** 2
WEIGHTS = random.integers(0, 3, 150).astype(float)
ASKED = random.uniform(-2, 2, size=(20, 2))


@pytest.mark.parametrize("weighted", [False, True])
def test_it_agrees_with_a_weighted_regression_for_every_row(weighted: bool) -> None:
    chosen = WEIGHTS if weighted else None
    found = LocallyWeightedRegression(0.4, chunk_rows=17).fit(X, Y, chosen).predict(ASKED)
    for row, value in zip(ASKED, found, strict=True):
        near = np.exp(-np.square(X - row).sum(axis=1) / (2 * 0.4**2))
        near = near * (WEIGHTS if weighted else 1)
        expected = sklearn.linear_model.LinearRegression().fit(X, Y, near).predict(row[None])[0]
        np.testing.assert_allclose(value, expected, rtol=1e-7)


def test_a_curve_is_followed() -> None:
    model = LocallyWeightedRegression(0.2, chunk_rows=40).fit(X, Y)
    assert model.score(X, Y) > 0.97


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 12), st.integers(1, 5), st.floats(0.01, 100))
def test_planes_are_exact_wherever_they_are_asked_for(
    rows: int, chunk_rows: int, width: float
) -> None:
    X = np.linspace(0, 1, rows)[:, None] ** [1, 2]
    y = X @ [2.0, -1.0] + 3
    model = LocallyWeightedRegression(width, chunk_rows=chunk_rows).fit(X, y)
    np.testing.assert_allclose(model.predict(X), y, rtol=1e-6)


def test_rows_far_from_all_others_get_what_is_nearest() -> None:
    model = LocallyWeightedRegression(0.01, chunk_rows=10).fit(X, Y)
    nearest = int(np.square(X - 900.0).sum(axis=1).argmin())
    np.testing.assert_allclose(model.predict([[900.0, 900.0]]), Y[nearest], atol=1e-6)


def test_refused() -> None:
    for width in (0, -1, np.inf):
        with pytest.raises(ValueError, match="bandwidth="):
            LocallyWeightedRegression(width).fit(X, Y)
    bad = X.copy()
    bad[33, 1] = np.nan
    with pytest.raises(ValueError, match=r"row 33, column 1 is nan \(chunk 3, its row 3\)"):
        LocallyWeightedRegression(chunk_rows=10).fit(bad, Y)
