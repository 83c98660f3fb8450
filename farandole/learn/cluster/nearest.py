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
_TOGETHER = 2048  # rows, whose products then stay in the cache of a core


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
            # Repeated for every row: added four times as fast as one row to each of them.
            offsets = self._offsets.astype(np.float32)
            self._offsets_32 = np.ascontiguousarray(
                np.broadcast_to(offsets, (_TOGETHER, len(centres)))
            )
            self._high = centres.astype(np.float32)
            self._low = (centres - self._high).astype(np.float32)

    def of_rows(self, X: Any) -> Labels:
        """In float64."""
        return _argmin(np.asarray(X @ self._factors), self._offsets)

    def of(self, chunk: Chunk) -> Labels:
        """In float32 where that is as good."""
        if self._is_single(chunk):
            return np.concatenate([self._of_float32(rows) for rows in _together(chunk.given)])
        return self.of_rows(chunk.X)

    def _of_float32(self, rows: Any) -> Labels:
        """Of up to `_TOGETHER` rows. Those that are too large for float32 are in float64."""
        try:
            with np.errstate(over="raise", invalid="raise"):
                return _argmin(rows @ self._factors_32, self._offsets_32[: len(rows)])
        except FloatingPointError:
            return self.of_rows(rows.astype(np.float64))

    def sums(self, chunk: Chunk) -> tuple[Array, Array]:
        """The weight of the rows of each centre, and their weighted sum."""
        clusters, rows = len(self.centres), chunk.rows
        if chunk.weights is None and clusters <= _FEW and self._is_single(chunk):
            with np.errstate(over="ignore", invalid="ignore"):
                found = self._sums_of_float32(chunk.given)
            if np.isfinite(found[1]).all():
                return found
        nearest = self.of(chunk)
        counts = np.bincount(nearest, chunk.weights, clusters).astype(np.float64)
        # One entry in each column: SciPy adds row after row to the sum of its cluster.
        places = (chunk.weight, nearest.astype(np.int32), np.arange(rows + 1, dtype=np.int32))
        sums = scipy.sparse.csc_array(places, shape=(clusters, rows)) @ chunk.X
        return counts, sums.toarray() if scipy.sparse.issparse(sums) else sums

    def _sums_of_float32(self, X: Any) -> tuple[Array, Array]:
        """Products with ones and zeros, of `_TOGETHER` rows at a time; their sums are float64. The
        rounding of so few rows is as that of the rows themselves, and has no direction."""
        clusters = len(self.centres)
        ones = np.eye(clusters, dtype=np.float32)
        counts = np.zeros(clusters, dtype=np.int64)
        sums = np.zeros((clusters, X.shape[1]))
        for rows in _together(X):
            nearest = self._of_float32(rows)
            counts += np.bincount(nearest, minlength=clusters)
            sums += ones.take(nearest, axis=0).T @ rows
        return counts.astype(np.float64), sums

    def _is_single(self, chunk: Chunk) -> bool:
        rows = chunk.given
        return self._single and rows.dtype == np.float32 and not scipy.sparse.issparse(rows)

    def squares(self, chunk: Chunk, nearest: Labels) -> Array:
        """The squared distance of each row from its centre."""
        if scipy.sparse.issparse(chunk.given):
            return squared_distances(chunk.X, self.centres)[np.arange(chunk.rows), nearest]
        if self._is_single(chunk):
            with np.errstate(over="ignore"):
                found = self._squares_of_float32(chunk.given, nearest)
            if np.isfinite(found).all():
                return found
        apart = self.centres.take(nearest, axis=0)
        apart -= chunk.X
        squares: Array = np.einsum("ij,ij->i", apart, apart)
        return squares

    def _squares_of_float32(self, X: Any, nearest: Labels) -> Array:
        """A centre is the sum of two float32, so that its rounding costs no digits of a row that is
        near it."""
        found = np.empty(len(X))
        for at, rows in enumerate(_together(X)):
            place = slice(at * _TOGETHER, at * _TOGETHER + len(rows))
            apart = rows - self._high.take(nearest[place], axis=0)
            apart -= self._low.take(nearest[place], axis=0)
            found[place] = np.einsum("ij,ij->i", apart, apart)
        return found


def _together(X: Any) -> list[Any]:
    return [X[first : first + _TOGETHER] for first in range(0, len(X), _TOGETHER)]


def _argmin(scores: Any, offsets: Any) -> Labels:
    scores += offsets
    found: Labels = scores.argmin(axis=1)
    return found


def _tells_apart(dtype: Any, middle: Array, apart: Array) -> bool:
    radius = np.sqrt(np.einsum("ij,ij->i", apart, apart).max())
    between = squared_distances(apart, apart)
    np.fill_diagonal(between, np.inf)
    error = 8 * np.finfo(dtype).eps * (np.linalg.norm(middle) + 2 * radius) * radius
    # And squares of such distances are neither too large nor too small for float32.
    return bool(error <= 1e-3 * between.min()) and bool(1e-10 < radius < 1e15)
