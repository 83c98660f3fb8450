"""Which centre is the nearest one of each row.

The square of the row itself does not matter, and x·c is taken from the middle of the centres: far
from zero, where they are much closer to each other than to it, that loses fewer digits.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import scipy.sparse

from farandole.learn.linear.moments import Array
from farandole.learn.sources.chunk import Chunk

Labels = npt.NDArray[np.int64]
_FEW = 32  # clusters, up to which a product with ones and zeros is faster than adding rows
_TOGETHER = 128


def squared_distances(X: Any, centres: Array) -> Array:
    """Of each row from each centre, up to rounding not below 0."""
    squares = X.multiply(X).sum(axis=1) if hasattr(X, "multiply") else np.einsum("ij,ij->i", X, X)
    squares = np.asarray(squares).reshape(-1, 1)
    found = np.asarray(X @ centres.T)
    found *= -2.0
    found += squares
    found += np.einsum("ij,ij->i", centres, centres)
    distances: Array = np.maximum(found, 0.0, out=found)
    return distances


class NearestCentres:
    """Of rows from `centres`, for which it is made once in a pass.

    Of float32 rows the products are float32, and the sums of a few rows, which takes half the time,
    where that tells the centres apart. A product is wrong by about eps · ‖row‖ · ‖centre − middle‖.
    That shall be a thousandth of the squared distance of the two nearest centres: a row that is
    then given to the wrong one of two is as good as equally far from both.
    """

    def __init__(self, centres: Array) -> None:
        middle = centres.mean(axis=0)
        apart = centres - middle
        self.centres = centres
        self._factors = np.ascontiguousarray(-2.0 * apart.T)
        self._offsets = np.einsum("ij,ij->i", apart, centres + middle)
        self._single = _tells_apart(np.float32, middle, apart)
        if self._single:
            self._factors_32 = self._factors.astype(np.float32)
            self._offsets_32 = self._offsets.astype(np.float32)

    def of_rows(self, X: Any) -> Labels:
        """In float64."""
        return _argmin(np.asarray(X @ self._factors), self._offsets)

    def of(self, chunk: Chunk) -> Labels:
        """In float32 where that is as good."""
        if self._is_single(chunk):
            return _argmin(chunk.given @ self._factors_32, self._offsets_32)
        return self.of_rows(chunk.X)

    def sums(self, chunk: Chunk, nearest: Labels) -> Array:
        """Of the weighted rows of each centre."""
        clusters, rows = len(self.centres), chunk.rows
        if chunk.weights is None and clusters <= _FEW and self._is_single(chunk):
            return _sums_of_float32(chunk.given, nearest, clusters)
        # One entry in each column: SciPy adds row after row to the sum of its cluster.
        places = (chunk.weight, nearest.astype(np.int32), np.arange(rows + 1, dtype=np.int32))
        found = scipy.sparse.csc_array(places, shape=(clusters, rows)) @ chunk.X
        sums: Array = found.toarray() if scipy.sparse.issparse(found) else found
        return sums

    def _is_single(self, chunk: Chunk) -> bool:
        rows = chunk.given
        return self._single and rows.dtype == np.float32 and not scipy.sparse.issparse(rows)

    def squares(self, chunk: Chunk, nearest: Labels) -> Array:
        """The squared distance of each row from its centre."""
        if scipy.sparse.issparse(chunk.X):
            return squared_distances(chunk.X, self.centres)[np.arange(chunk.rows), nearest]
        apart = self.centres.take(nearest, axis=0)
        apart -= chunk.X
        found: Array = np.einsum("ij,ij->i", apart, apart)
        return found


def _argmin(scores: Any, offsets: Any) -> Labels:
    scores += offsets
    found: Labels = scores.argmin(axis=1)
    return found


def _sums_of_float32(X: Any, nearest: Labels, clusters: int) -> Array:
    """Products with ones and zeros, of `_TOGETHER` rows at a time; their sums are float64. The
    rounding of so few rows is as that of the rows themselves, and has no direction."""
    whole = len(X) // _TOGETHER * _TOGETHER
    numbers = np.arange(clusters)[:, None]
    found = np.zeros((clusters, X.shape[1]))
    if whole:
        members = nearest[:whole].reshape(-1, 1, _TOGETHER) == numbers
        parts = X[:whole].reshape(-1, _TOGETHER, X.shape[1])
        found += (members.astype(np.float32) @ parts).sum(axis=0, dtype=np.float64)
    if whole < len(X):
        found += (nearest[whole:] == numbers).astype(np.float32) @ X[whole:]
    return found


def _tells_apart(dtype: Any, middle: Array, apart: Array) -> bool:
    radius = np.sqrt(np.einsum("ij,ij->i", apart, apart).max())
    between = squared_distances(apart, apart)
    np.fill_diagonal(between, np.inf)
    error = 8 * np.finfo(dtype).eps * (np.linalg.norm(middle) + 2 * radius) * radius
    return bool(error <= 1e-3 * between.min()) and radius < 1e15  # its square is below the largest
