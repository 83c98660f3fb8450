"""Rows in float32 are as good as in float64, or are computed in float64."""

from __future__ import annotations

import numpy as np
import pytest

from farandole.learn.cluster.nearest import NearestCentres
from farandole.learn.sources.chunk import Chunk

random = np.random.default_rng(0)
CENTRES = 4.0 * np.eye(5, 6)


def rows(count: int = 5000) -> np.ndarray:
    picked = CENTRES[random.integers(0, len(CENTRES), count)]
    return picked + 0.1 * random.normal(size=picked.shape)


@pytest.mark.parametrize(("shift", "scale"), [(0.0, 1.0), (300.0, 1.0), (0.0, 1e-25), (0.0, 1e14)])
def test_float32_agrees_with_float64(shift: float, scale: float) -> None:
    X = ((rows() + shift) * scale).astype(np.float32)
    nearest = NearestCentres((CENTRES + shift + 1e-4) * scale)
    single = Chunk(X, None, None, 0, 0)
    double = Chunk(X.astype(np.float64), None, None, 0, 0)
    labels = nearest.of(double)
    assert np.array_equal(nearest.of(single), labels)
    assert np.allclose(nearest.squares(single, labels), nearest.squares(double, labels), rtol=2e-6)
    for mine, expected in zip(nearest.sums(single), nearest.sums(double), strict=True):
        assert np.allclose(mine, expected, rtol=2e-6, atol=1e-6 * abs(expected).max())


def test_rows_too_large_for_float32_squares() -> None:
    X = rows(100).astype(np.float32)
    X[7, 3] = 1e30
    X[[8, 9], 3] = 3e38
    nearest = NearestCentres(CENTRES)
    chunk = Chunk(X, None, None, 0, 0)
    labels = nearest.of(chunk)
    assert np.array_equal(labels, nearest.of_rows(X.astype(np.float64)))
    assert nearest.squares(chunk, labels)[7] == pytest.approx(1e60, rel=1e-6)
    assert np.isfinite(nearest.sums(chunk)[1]).all()
