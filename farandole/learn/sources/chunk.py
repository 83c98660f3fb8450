"""Some rows that follow each other."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import scipy.sparse

Matrix = Any  # a NumPy array, or SciPy's sparse rows
Vector = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Chunk:
    """`given` are the rows in the type that the source has. `y` and `weights` are None if there are
    none."""

    given: Matrix
    y: npt.NDArray[Any] | None
    weights: Vector | None
    first: int  # its first row, in the whole source
    number: int

    @cached_property
    def X(self) -> Matrix:  # noqa: N802 (the field's name for it)
        """In float64, whatever the source has."""
        if scipy.sparse.issparse(self.given):
            return self.given.astype(np.float64, copy=False)
        return np.ascontiguousarray(self.given, dtype=np.float64)

    @property
    def rows(self) -> int:
        return int(self.given.shape[0])

    @property
    def weight(self) -> Vector:
        """Of each row; 1 if none were given."""
        return np.ones(self.rows) if self.weights is None else self.weights

    @property
    def dense(self) -> Vector:
        """X as an array, also where the source is sparse: a chunk of it is small enough."""
        found: Vector = self.X.toarray() if scipy.sparse.issparse(self.X) else self.X
        return found
