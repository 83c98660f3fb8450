"""A row of things cut into pieces that differ by at most one thing.

NumPy is imported by whoever wants arrays: pipelines and help texts do without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


def piece(index: int, pieces: int, length: int) -> range:
    """Where piece `index` lies when `length` things are cut into `pieces`; any length, even 0."""
    return range(index * length // pieces, (index + 1) * length // pieces)


def piece_bounds(pieces: int, length: int) -> npt.NDArray[np.int64]:
    """Where each piece begins, and where the last one ends: `piece` for all indices at once."""
    import numpy as np

    return np.arange(pieces + 1, dtype=np.int64) * length // pieces
