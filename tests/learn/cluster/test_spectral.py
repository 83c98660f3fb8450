"""Shapes that k-means cannot tell apart."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import sklearn.cluster
from sklearn.datasets import make_blobs, make_circles
from sklearn.metrics import adjusted_rand_score

from farandole.learn import KMeans, SpectralClustering


@pytest.mark.parametrize("far", [0.0, 1e6])
@pytest.mark.parametrize("landmarks", [500, 100])
def test_circles(landmarks: int, far: float) -> None:
    X, labels = make_circles(300, factor=0.3, noise=0.03, random_state=0)
    ours = SpectralClustering(2, gamma=20, n_landmarks=landmarks, random_state=0, chunk_rows=70)
    assert adjusted_rand_score(labels, ours.fit_predict(X + far)) == 1
    assert adjusted_rand_score(labels, KMeans(2, random_state=0).fit_predict(X)) < 0.1


def test_it_agrees_with_scikit_learn() -> None:
    X = make_blobs(200, 3, centers=4, cluster_std=1.2, random_state=1)[0]
    theirs = sklearn.cluster.SpectralClustering(4, gamma=0.3, random_state=0).fit_predict(X)
    ours = SpectralClustering(4, gamma=0.3, random_state=0, chunk_rows=30).fit_predict(X)
    assert adjusted_rand_score(theirs, ours) > 0.98


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gamma": 0}, "gamma=0"),
        ({"n_clusters": 0}, "n_clusters=0"),
        ({"n_clusters": 3, "n_landmarks": 2}, "n_landmarks=2"),
        ({"n_clusters": 6}, "n_samples=5 should be >= n_clusters=6"),
    ],
)
def test_refused(options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SpectralClustering(**options).fit(np.eye(5))
