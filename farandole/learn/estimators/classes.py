"""The classes of a classifier: the labels of y as numbers from 0 on."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import column_or_1d


def encoded(
    y: Any, name: str, known: npt.NDArray[Any] | None = None
) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64]]:
    """The sorted classes, and the place of each label among them.

    `known`: the classes were said before. Raises `ValueError` for a label that is none of them.
    """
    if y is None:
        raise ValueError(
            f"This {name} estimator requires y to be passed, but the target y is None."
        )
    y = column_or_1d(y, warn=True)
    check_classification_targets(y)
    if known is None:
        classes, places = np.unique(y, return_inverse=True)
        return classes, places
    unseen = np.setdiff1d(y, known)
    if len(unseen):
        raise ValueError(
            f"y has labels that were not among the classes of the first call: {unseen[:5]}. The "
            f"classes are {known}; give all of them with classes= in the first call."
        )
    return known, np.searchsorted(known, y)


def require_two(classes: npt.NDArray[Any]) -> None:
    """Raises `ValueError` where there is nothing to tell apart."""
    if len(classes) < 2:
        raise ValueError(
            "This solver needs samples of at least 2 classes in the data, but the data contains "
            f"only one class: {classes[0]!r}"
        )
