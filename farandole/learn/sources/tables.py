"""What users pass as X, y and sample_weight, as tables with rows.

Arrays in memory are looked at as scikit-learn does. Whatever has a shape, a dtype and slices of
rows, and is not in memory (a memory map, a dataset of HDF5 or Zarr, a Dask array), is read chunk by
chunk, and looked at then.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import scipy.sparse


def is_outside_memory(X: Any) -> bool:
    """Whether reading all of it at once is to be avoided."""
    if isinstance(X, np.memmap):
        return True
    if isinstance(X, np.ndarray) or scipy.sparse.issparse(X) or hasattr(X, "columns"):
        return False
    if type(X).__module__.split(".")[0] == "torch":
        return False
    return all(hasattr(X, name) for name in ("shape", "dtype", "__getitem__")) and hasattr(
        X, "ndim"
    )


def in_memory(X: Any) -> Any:
    """Tensors as arrays, which share their memory. Others as they are."""
    if type(X).__module__.split(".")[0] == "torch":
        return X.detach().cpu().numpy()
    return X


def require_numeric_table(X: Any) -> None:
    """Raises `ValueError` for one that is not outside memory as it should be."""
    if len(X.shape) != 2:
        raise ValueError(f"Expected 2D array, got one of shape {tuple(X.shape)} instead.")
    if np.dtype(X.dtype).kind not in "fiub":
        raise ValueError(f"X has the dtype {X.dtype}. Give numbers: floats, integers or booleans.")
