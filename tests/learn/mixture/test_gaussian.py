"""Mixtures have scikit-learn's likelihoods."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import sklearn.mixture
from sklearn.datasets import load_iris, make_blobs
from sklearn.exceptions import ConvergenceWarning

from farandole.learn import GaussianMixture

BLOBS = make_blobs(240, 3, centers=4, cluster_std=[0.5, 1.0, 1.5, 2.0], random_state=3)[0]
IRIS = load_iris().data


@pytest.mark.parametrize("kind", ["full", "tied", "diag", "spherical"])
@pytest.mark.parametrize(("X", "components"), [(BLOBS, 4), (IRIS, 3)], ids=["blobs", "iris"])
def test_the_same_means_lead_to_the_same_mixture(kind: str, X: np.ndarray, components: int) -> None:
    start = sklearn.mixture.GaussianMixture(components, random_state=0).fit(X).means_
    options: dict[str, Any] = {"covariance_type": kind, "tol": 1e-7, "max_iter": 1000}
    ours = GaussianMixture(components, means_init=start, chunk_rows=31, **options).fit(X)
    best = sklearn.mixture.GaussianMixture(components, n_init=5, random_state=0, **options).fit(X)
    # Not by starts: from them both are free to find other optima.
    assert ours.converged_
    theirs = sklearn.mixture.GaussianMixture(components, **options)
    theirs.weights_, theirs.means_ = ours.weights_, ours.means_
    theirs.covariances_, theirs.precisions_cholesky_ = ours.covariances_, ours.precisions_cholesky_
    np.testing.assert_allclose(ours.score_samples(X), theirs.score_samples(X), rtol=1e-9)
    assert abs(ours.score(X) - theirs.score(X)) < 1e-9
    assert abs(ours.bic(X) - theirs.bic(X)) < 1e-6 * abs(theirs.bic(X))
    assert abs(ours.aic(X) - theirs.aic(X)) < 1e-6 * abs(theirs.aic(X))
    assert np.array_equal(ours.predict(X), theirs.predict(X))
    np.testing.assert_allclose(ours.predict_proba(X), theirs.predict_proba(X), atol=1e-9)
    # An optimum: scikit-learn's iterations go nowhere from here.
    again = sklearn.mixture.GaussianMixture(
        components,
        weights_init=ours.weights_,
        means_init=ours.means_,
        precisions_init=ours.precisions_,
        **options,
    ).fit(X)
    assert abs(again.lower_bound_ - ours.lower_bound_) < 1e-5
    if X is BLOBS:
        assert ours.lower_bound_ > best.lower_bound_ - 1e-3 * abs(best.lower_bound_)


def test_its_own_start_is_no_worse() -> None:
    ours = GaussianMixture(4, n_init=3, random_state=0, chunk_rows=50, tol=1e-6).fit(BLOBS)
    theirs = sklearn.mixture.GaussianMixture(4, n_init=3, random_state=0, tol=1e-6).fit(BLOBS)
    assert ours.lower_bound_ > theirs.lower_bound_ - 1e-3 * abs(theirs.lower_bound_)
    assert all(
        b >= a - 1e-9 for a, b in zip(ours.lower_bounds_, ours.lower_bounds_[1:], strict=False)
    )
    assert np.array_equal(ours.fit_predict(BLOBS), ours.predict(BLOBS))


def test_rows_far_from_zero() -> None:
    near = GaussianMixture(4, means_init=BLOBS[:4], chunk_rows=50, reg_covar=0).fit(BLOBS)
    far = GaussianMixture(4, means_init=BLOBS[:4] + 1e6, chunk_rows=50, reg_covar=0).fit(
        BLOBS + 1e6
    )
    np.testing.assert_allclose(far.covariances_, near.covariances_, rtol=1e-4)


@pytest.mark.parametrize(
    ("options", "X", "message"),
    [
        ({"n_components": 5}, BLOBS[:3], "n_samples=3 should be >= n_components=5"),
        ({"n_components": 0}, BLOBS, "n_components=0"),
        ({"covariance_type": "round"}, BLOBS, "covariance_type='round'"),
        ({"reg_covar": -1}, BLOBS, "reg_covar=-1"),
        ({"means_init": np.zeros((2, 3))}, BLOBS, r"shape \(2, 3\), and needs \(1, 3\)"),
        ({"reg_covar": 0}, np.ones((9, 2)), "ill-defined empirical covariance"),
        ({"reg_covar": 0, "covariance_type": "diag"}, np.ones((9, 2)), "ill-defined"),
    ],
)
def test_refused(options: Any, X: np.ndarray, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GaussianMixture(**options).fit(X)


def test_too_few_iterations_are_said() -> None:
    with pytest.warns(ConvergenceWarning, match="not converged after 1 iterations"):
        GaussianMixture(3, max_iter=1, random_state=0).fit(BLOBS)
