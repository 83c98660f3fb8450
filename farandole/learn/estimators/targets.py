"""The targets of a regression, as scikit-learn looks at them."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from sklearn.utils.validation import check_array, column_or_1d


def numeric_targets(y: Any, name: str) -> npt.NDArray[np.float64]:
    """One or more columns, all finite. `name` is that of the estimator."""
    if y is None:
        raise ValueError(
            f"This {name} estimator requires y to be passed, but the target y is None."
        )
    found: npt.NDArray[np.float64] = check_array(
        y, ensure_2d=False, dtype=np.float64, input_name="y"
    )
    return found


def one_target(y: Any, name: str) -> npt.NDArray[np.float64]:
    """One column."""
    found: npt.NDArray[np.float64] = column_or_1d(numeric_targets(y, name), warn=True)
    return found
