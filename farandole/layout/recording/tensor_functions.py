"""Functions of torch as a recording meets them: their names, and what asking them gives away."""

from __future__ import annotations

import sys
from typing import Any

import torch

SAME_FOR_ALL_BATCHES = {
    *("dtype", "device", "layout", "ndim", "dim", "requires_grad", "is_leaf", "grad_fn", "grad"),
    *("is_cuda", "is_cpu", "is_meta", "is_sparse", "is_quantized", "is_nested", "is_mps", "is_xpu"),
    *("is_floating_point", "is_complex", "is_signed", "element_size", "itemsize", "get_device"),
    *("is_inference", "is_conj", "is_neg", "names", "_is_view", "__hash__"),
    *("__repr__", "__str__", "__format__"),
}
"""What is asked of a tensor, and follows from what the sample says about all batches."""


BY_VALUE = {
    *("item", "tolist", "numpy", "equal", "allclose", "is_nonzero", "data_ptr", "__array__"),
    *("__bool__", "__int__", "__float__", "__index__", "__complex__", "__contains__"),
    *("__deepcopy__", "__reduce_ex__", "__dlpack__", "storage", "untyped_storage"),
}


def name_of(func: Any) -> tuple[str, bool]:
    """A function's name, and whether it is the look-up of a tensor's attribute."""
    name = getattr(func, "__name__", type(func).__name__)
    if name == "__get__":
        return getattr(func.__self__, "__name__", "") or func.__self__.fget.__name__, True
    return name, False


def can_be_named(func: Any, name: str) -> bool:
    """Whether the code that fx makes of a graph finds it by its name."""
    places = (sys.modules.get(getattr(func, "__module__", None) or ""), torch, torch.nn.functional)
    return any(getattr(place, name, None) is func for place in places if place is not None)
