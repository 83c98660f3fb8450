"""Every estimator has the same bits on any number of workers, at one `chunk_rows`."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.base import is_regressor

import farandole.learn as learn
from farandole.learn.pools.here import Here
from farandole.testing import run_world

# That a few iterations are too few. Not by `catch_warnings`: ranks are threads here.
pytestmark = pytest.mark.filterwarnings("ignore:not converged")

random = np.random.default_rng(0)
X = np.abs(random.normal(size=(90, 5)) @ random.normal(size=(5, 5))).round(2).astype(np.float32)
Y = X @ random.normal(size=5)
LABELS = np.digitize(Y, np.quantile(Y, [0.3, 0.7]))
# Few iterations are enough to show a difference.
OPTIONS: dict[str, dict[str, Any]] = {
    "KMeans": {"n_clusters": 3},
    "GaussianMixture": {"n_components": 2, "max_iter": 4},
    "FastICA": {"max_iter": 4},
    "LatentDirichletAllocation": {"n_components": 2, "max_iter": 2, "max_doc_update_iter": 5},
    "MLPClassifier": {"hidden_layer_sizes": (4,), "max_iter": 4},
    "MLPRegressor": {"hidden_layer_sizes": (4,), "max_iter": 4},
    "SpectralClustering": {"n_clusters": 3, "n_init": 1, "n_landmarks": 30},
    "PCA": {"n_components": 2, "svd_solver": "randomized", "n_oversamples": 1},
    "TruncatedSVD": {"n_oversamples": 1},
}
ESTIMATORS = [name for name in learn.__all__ if name != "describe"]


def numbers_of(name: str, pool: Any, seed: Any) -> list[np.ndarray]:
    """All that was learnt, and what is predicted from it."""
    estimator = getattr(learn, name)(pool=pool, chunk_rows=13, **OPTIONS.get(name, {}))
    if "random_state" in estimator.get_params():
        estimator.set_params(random_state=seed)
    estimator.fit(X, Y if is_regressor(estimator) else LABELS)
    found = [value for key, value in sorted(vars(estimator).items()) if key.endswith("_")]
    for method in ("predict", "transform", "predict_proba", "score_samples"):
        if hasattr(estimator, method):
            found.append(getattr(estimator, method)(X))
    return [value for value in found if isinstance(value, np.ndarray)]


def description(pool: Any) -> list[np.ndarray]:
    found = learn.describe(X, pool=pool, chunk_rows=13, sketch_size=16)
    names = ("mean", "variance", "skewness", "kurtosis", "covariance", "median", "unique")
    return [getattr(found, name) for name in names]


def equal(found: list[np.ndarray], expected: list[np.ndarray]) -> bool:
    assert len(expected) > 0
    return all(np.array_equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.fixture(scope="module")
def processes() -> Iterator[ProcessPoolExecutor]:
    with ProcessPoolExecutor(2, get_context("forkserver")) as executor:
        yield executor


@pytest.mark.parametrize("name", [*ESTIMATORS, "describe"])
def test_on_every_pool(name: str, processes: Any, tmp_path: Path) -> None:
    def work(pool: Any) -> list[np.ndarray]:
        return description(pool) if name == "describe" else numbers_of(name, pool, 3)

    expected = work(Here(1))
    for found in (work(Here(3)), work(processes), *run_world(2, work, folder=tmp_path)):
        assert equal(found, expected)


@pytest.mark.parametrize(
    "name", [name for name in ESTIMATORS if "random_state" in getattr(learn, name)().get_params()]
)
def test_ranks_agree_on_what_they_draw(name: str, tmp_path: Path) -> None:
    """Without a `random_state`, or with generators that differ."""

    def work(run: Any) -> list[np.ndarray]:
        return numbers_of(name, run, np.random.RandomState(run.rank))

    first, second = run_world(2, work, folder=tmp_path)
    assert equal(first, second)
