"""k-means over chunks that are placed: the start, and Lloyd's iterations from it."""

from __future__ import annotations

import warnings
from typing import NamedTuple

import numpy as np
from sklearn.cluster import KMeans as SklearnKMeans
from sklearn.exceptions import ConvergenceWarning

from farandole.learn.cluster.lloyd import CostSum, FarthestSum, LloydSum, OneRowSum, OversampleSum
from farandole.learn.linear.moments import Array
from farandole.learn.pools.base import Placed

_ROUNDING = (8 * np.finfo(np.float64).eps) ** 2
_TURNS = 5  # of k-means‖; more make little difference
_OVERSAMPLING = 2.0  # rows to draw in each turn, in numbers of clusters


class Clustering(NamedTuple):
    centres: Array
    iterations: int
    converged: bool


def drawn_centres(placed: Placed, clusters: int, seed: int) -> Array:
    """A start by k-means‖: candidates are drawn in a few passes, whatever the clusters are."""
    candidates = placed.sum(OneRowSum(seed))[None, :]
    for turn in range(_TURNS):
        cost = placed.sum(CostSum(), candidates)
        if not cost > 0:
            break  # every row is a candidate
        job = OversampleSum(seed, turn, cost, _OVERSAMPLING * clusters)
        candidates = np.concatenate([candidates, placed.sum(job, candidates)])
    return _reduced(placed, candidates, clusters, seed)


def _reduced(placed: Placed, candidates: Array, clusters: int, seed: int) -> Array:
    """As many as asked: the candidates, weighted by their rows, are few enough to cluster here."""
    if len(candidates) <= clusters:
        missing = clusters - len(candidates)
        more = [placed.sum(OneRowSum(seed + 1 + at)) for at in range(missing)]
        return np.concatenate([candidates, *(row[None, :] for row in more)])
    weights = placed.sum(LloydSum(), candidates)["counts"]
    small = SklearnKMeans(clusters, n_init=3, random_state=seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # equal rows; whoever fits looks itself
        small.fit(candidates, sample_weight=weights)
    found: Array = small.cluster_centers_.astype(np.float64)
    return found


def iterate(placed: Placed, centres: Array, tolerance: float, most: int) -> Clustering:
    """Until the centres move, squared, by no more than `tolerance` in all."""
    job = LloydSum()
    for iteration in range(1, most + 1):
        found = placed.sum(job, centres)
        counts = found["counts"][:, None]
        moved = centres + np.divide(
            found["shifts"], counts, out=np.zeros_like(centres), where=counts > 0
        )
        empty = np.flatnonzero(found["counts"] == 0)
        filled = len(empty) > 0 and _fill(placed, moved, centres, int(empty[0]))
        shift = float(((moved - centres) ** 2).sum())
        centres = moved
        # With the same rows in every cluster, the last bits of the centres may still change.
        resting = max(tolerance, _ROUNDING * float((centres**2).sum()))
        if shift <= resting and not filled:
            return Clustering(centres, iteration, True)
    return Clustering(centres, most, False)


def _fill(placed: Placed, moved: Array, centres: Array, empty: int) -> bool:
    """Moves a centre without rows to the row that is farthest from all. One in each iteration: the
    next has others far away. False if every row is a centre."""
    farthest = placed.sum(FarthestSum(), centres)
    if not farthest["distance"] > 0:
        return False
    moved[empty] = farthest["row"]
    return True
