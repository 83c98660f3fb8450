"""Expectation and maximisation of a mixture of normal distributions: one sum each iteration.

The expectation of a row needs this row and the parameters alone. The maximisation needs, of each
component, the sums of the rows' shares, of the shares times the rows, and times the products of
their columns. Rows are taken less the component's present mean, so that means far from zero lose
no digits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from scipy import linalg
from scipy.special import logsumexp

from farandole.learn.cluster.nearest import squared_distances
from farandole.learn.linear.moments import Array
from farandole.learn.sources.chunk import Chunk
from farandole.learn.sums.sum import Statistics, Sum, as_statistics

KINDS = ("full", "tied", "diag", "spherical")


class Mixture(NamedTuple):
    """The covariances, and the square roots of their inverses, have scikit-learn's shapes:
    components × columns², columns², components × columns, components."""

    kind: str
    weights: Array
    means: Array
    covariances: Array
    roots: Array  # such that the precision is root rootᵀ

    def log_joint(self, X: Array) -> Array:
        """log P(row, component), rows × components."""
        columns = X.shape[1]
        found = np.empty((len(X), len(self.means)))
        for place, mean in enumerate(self.means):
            root = self.roots if self.kind == "tied" else self.roots[place]
            centred = X - mean
            if self.kind in ("full", "tied"):
                scaled, volume = centred @ root, np.log(np.diag(root)).sum()
            else:
                scaled = centred * root
                volume = np.log(np.broadcast_to(root, columns)).sum()
            found[:, place] = volume - 0.5 * np.einsum("ij,ij->i", scaled, scaled)
        with np.errstate(divide="ignore"):
            found += np.log(self.weights) - 0.5 * columns * np.log(2 * np.pi)
        return found


class Start(NamedTuple):
    """Before the first iteration: each row belongs to the nearest centre."""

    kind: str
    means: Array


@dataclass(frozen=True)
class ExpectationSum(Sum):
    """The state is a `Mixture` or a `Start`; the result, the next `Mixture` and the mean log
    likelihood under the present one."""

    ridge: float  # on the diagonals of the covariances

    def map(self, chunk: Chunk, state: Mixture | Start) -> Statistics:
        X = chunk.dense
        if isinstance(state, Start):
            nearest = squared_distances(X, state.means).argmin(axis=1)
            shares = np.zeros((chunk.rows, len(state.means)))
            shares[np.arange(chunk.rows), nearest] = 1.0
            likelihood = 0.0
        else:
            joint = state.log_joint(X)
            rows = logsumexp(joint, axis=1)
            shares = np.exp(joint - rows[:, None])
            likelihood = float(rows.sum())
        shifts = np.empty_like(state.means)
        products = []
        for place, mean in enumerate(state.means):
            centred = X - mean
            weighted = centred * shares[:, place, None]
            shifts[place] = weighted.sum(axis=0)
            if state.kind in ("full", "tied"):
                products.append(weighted.T @ centred)
            else:
                products.append(np.einsum("ij,ij->j", weighted, centred))
        return as_statistics(
            rows=chunk.rows,
            likelihood=likelihood,
            counts=shares.sum(axis=0),
            shifts=shifts,
            products=np.stack(products),
        )

    def finish(self, statistics: Statistics, state: Mixture | Start) -> tuple[Mixture, float]:
        kind, rows = state.kind, int(statistics["rows"])
        counts = statistics["counts"] + 10 * np.finfo(np.float64).eps
        shifts = statistics["shifts"] / counts[:, None]
        if kind in ("full", "tied"):
            squares = shifts[:, :, None] * shifts[:, None, :]
            covariances = statistics["products"] / counts[:, None, None] - squares
        else:
            covariances = statistics["products"] / counts[:, None] - shifts**2
        if kind == "tied":
            covariances = np.tensordot(counts, covariances, 1) / counts.sum()
        elif kind == "spherical":
            covariances = covariances.mean(axis=1)
        if kind in ("full", "tied"):
            covariances = covariances + self.ridge * np.eye(shifts.shape[1])
        else:
            covariances = np.maximum(covariances, 0.0) + self.ridge
        weights = counts / counts.sum()
        means = state.means + shifts
        mixture = Mixture(kind, weights, means, covariances, inverse_roots(kind, covariances))
        return mixture, float(statistics["likelihood"]) / rows


class LikelihoodSum(Sum):
    """The log likelihood of all rows."""

    def map(self, chunk: Chunk, state: Mixture) -> Statistics:
        return as_statistics(
            rows=chunk.rows, likelihood=logsumexp(state.log_joint(chunk.dense), axis=1).sum()
        )

    def finish(self, statistics: Statistics, state: Mixture) -> float:
        return float(statistics["likelihood"]) / int(statistics["rows"])


def inverse_roots(kind: str, covariances: Array) -> Array:
    """Raises `ValueError` where a covariance has none."""
    if kind in ("diag", "spherical"):
        if (covariances <= 0).any():
            raise ValueError(_DEGENERATE)
        found: Array = 1 / np.sqrt(covariances)
        return found
    identity = np.eye(covariances.shape[-1])
    try:
        roots = [
            linalg.solve_triangular(linalg.cholesky(each, lower=True), identity, lower=True).T
            for each in covariances.reshape(-1, *identity.shape)
        ]
    except linalg.LinAlgError as error:
        raise ValueError(_DEGENERATE) from error
    return roots[0] if kind == "tied" else np.stack(roots)


_DEGENERATE = (
    "Fitting the mixture model failed because some components have ill-defined empirical "
    "covariance (for instance caused by singleton or collapsed samples). Try to decrease the "
    "number of components, increase reg_covar, or scale the input data."
)
