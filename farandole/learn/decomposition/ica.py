"""Independent components by FastICA: whitened by the covariance, then one sum each iteration.

With whitened rows z and the rotation W, a parallel iteration (Hyvärinen and Oja 2000) is

    W ← E[g(W z) zᵀ] − E[g'(W z)] W,   made orthogonal: W ← (W Wᵀ)^(−½) W
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import numpy as np
from scipy import linalg
from sklearn.base import ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.exceptions import ConvergenceWarning

from farandole.learn.estimators.base import SumEstimator
from farandole.learn.linear.moments import Array, Moments, MomentSum
from farandole.learn.pools.base import Placed
from farandole.learn.sources.chunk import Chunk
from farandole.learn.sums.seed import SeedSum
from farandole.learn.sums.sum import Statistics, Sum, as_statistics
from farandole.learn.sums.together import Together

FUNCTIONS = ("logcosh", "exp", "cube")


class _State(NamedTuple):
    mean: Array
    whitening: Array  # components × columns
    rotation: Array  # components × components


@dataclass(frozen=True)
class ContrastSum(Sum):
    """g(W z) zᵀ and g'(W z), for the contrast function `fun`."""

    fun: str

    def map(self, chunk: Chunk, state: _State) -> Statistics:
        white = (chunk.X - state.mean) @ state.whitening.T
        value, slope = _contrast(self.fun, white @ state.rotation.T)
        return as_statistics(rows=chunk.rows, products=value.T @ white, slopes=slope.sum(axis=0))

    def finish(self, statistics: Statistics, state: _State) -> Array:
        rows = int(statistics["rows"])
        found = statistics["products"] - statistics["slopes"][:, None] * state.rotation
        return _orthogonal(found / rows)


def _contrast(name: str, x: Array) -> tuple[Array, Array]:
    if name == "logcosh":
        value = np.tanh(x)
        return value, 1 - value**2
    if name == "exp":
        bell = np.exp(-(x**2) / 2)
        return x * bell, (1 - x**2) * bell
    return x**3, 3 * x**2


def _orthogonal(rotation: Array) -> Array:
    values, vectors = linalg.eigh(rotation @ rotation.T)
    values = np.clip(values, np.finfo(float).tiny, None)
    found: Array = (vectors / np.sqrt(values)) @ vectors.T @ rotation
    return found


class FastICA(ClassNamePrefixFeaturesOutMixin, TransformerMixin, SumEstimator):
    """fun: "logcosh", "exp" or "cube". Components have unit variance; their order and signs are
    free. No more are found than there are independent columns."""

    _accepts_sparse = False

    def __init__(
        self,
        n_components: int | None = None,
        *,
        fun: str = "logcosh",
        max_iter: int = 200,
        tol: float = 1e-4,
        w_init: Any = None,
        random_state: Any = None,
        pool: Any = None,
        chunk_rows: int = 0,
    ) -> None:
        self.n_components = n_components
        self.fun = fun
        self.max_iter = max_iter
        self.tol = tol
        self.w_init = w_init
        self.random_state = random_state
        self.pool = pool
        self.chunk_rows = chunk_rows

    def fit(self, X: Any, y: Any = None) -> Self:
        """Of X (rows × columns). `y` is not used."""
        if self.fun not in FUNCTIONS:
            raise ValueError(f"fun={self.fun!r}: known are {FUNCTIONS}.")
        if self.max_iter < 1 or (self.n_components is not None and self.n_components < 1):
            raise ValueError(
                f"max_iter={self.max_iter}, n_components={self.n_components}: each is 1 or more."
            )
        with self._placed(X, least_rows=2) as placed:
            first = placed.sum(Together(moments=MomentSum(), seed=SeedSum(self.random_state)))
            moments: Moments = first["moments"]
            whitening = self._whitening(moments)
            state = _State(moments.mean, whitening, self._start(len(whitening), first["seed"]))
            rotation = self._iterate(placed, state)
        self.mean_ = moments.mean
        self.whitening_ = whitening
        self.components_ = rotation @ whitening
        self.mixing_ = linalg.pinv(self.components_)
        return self

    def _whitening(self, moments: Moments) -> Array:
        values, vectors = linalg.eigh(moments.products / moments.rows)
        values, vectors = values[::-1], vectors[:, ::-1]
        rank = int((values > values[0] * len(values) * 10 * np.finfo(float).eps).sum())
        rank = min(rank, moments.rows - 1)
        if rank < 1:
            raise ValueError(f"all rows are equal (n_samples={moments.rows}): nothing varies.")
        wanted = self.n_components or min(moments.rows, len(values))
        if wanted > rank:
            warnings.warn(
                f"n_components is too large: only {rank} columns are independent, so that it will "
                f"be set to {rank}.",
                UserWarning,
                stacklevel=3,
            )
        count = min(wanted, rank)
        return np.ascontiguousarray((vectors[:, :count] / np.sqrt(values[:count])).T)

    def _start(self, size: int, seed: int) -> Array:
        if self.w_init is None:
            return _orthogonal(np.random.RandomState(seed).normal(size=(size, size)))
        given = np.asarray(self.w_init, dtype=np.float64)
        if given.shape != (size, size):
            raise ValueError(f"w_init has the shape {given.shape}, and needs {(size, size)}.")
        return _orthogonal(given)

    def _iterate(self, placed: Placed, state: _State) -> Array:
        job = ContrastSum(self.fun)
        for iteration in range(1, self.max_iter + 1):
            self.n_iter_ = iteration
            new = placed.sum(job, state)
            turned = np.abs(np.abs(np.einsum("ij,ij->i", new, state.rotation)) - 1).max()
            state = state._replace(rotation=new)
            if turned < self.tol:
                return state.rotation
        warnings.warn(
            f"not converged after {self.max_iter} iterations: the last turned a component by "
            f"{turned:.3g}. Raise max_iter or tol.",
            ConvergenceWarning,
            stacklevel=3,
        )
        return state.rotation

    def transform(self, X: Any) -> Array:
        """The components of each row."""
        found: Array = self._by_rows(X, lambda rows: (rows - self.mean_) @ self.components_.T)
        return found

    def inverse_transform(self, X: Any) -> Array:
        """The rows that have these components."""
        found: Array = np.asarray(X) @ self.mixing_.T + self.mean_
        return found

    @property
    def _n_features_out(self) -> int:
        return len(self.components_)
