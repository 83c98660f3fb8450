"""The one seam of `learn`: everything that an estimator does with data is a `Sum`.

    map(chunk, state)       → statistics    where the chunk is, in any process
    merge(left, right)      → statistics    in a fixed order (`tree`)
    finish(statistics)      → state         once, by whoever asked

Statistics are dicts of NumPy arrays: their size depends on the number of columns, not on that of
the rows, so they may travel. A `Sum` itself may travel too, and holds nothing large.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from farandole.learn.sources.chunk import Chunk

Statistics = Mapping[str, npt.NDArray[Any]]


class Sum(ABC):
    """One pass over all chunks."""

    in_blocks = False
    """Whether a chunk is given to `map` in blocks that fit into the cache of a core, one after the
    other, and their statistics are merged: for maps whose statistics are small, and which do not
    depend on the number of their chunk."""

    @abstractmethod
    def map(self, chunk: Chunk, state: Any) -> Statistics:
        """What this chunk adds. `state` is what the pass before has found."""

    def merge(self, left: Statistics, right: Statistics) -> Statistics:
        """Of rows `left` and of the rows after them. Associative up to rounding."""
        return {name: left[name] + right[name] for name in left}

    @abstractmethod
    def finish(self, statistics: Statistics, state: Any) -> Any:
        """The new state, from the statistics of all rows."""


def as_statistics(**values: npt.ArrayLike) -> Statistics:
    """Numbers become arrays, integers stay exact."""
    return {name: np.asarray(value) for name, value in values.items()}
