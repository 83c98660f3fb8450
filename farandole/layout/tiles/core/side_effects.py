"""Functions that do something to a tensor, or show where it lies: not for tensors that are divided.

They would reach this lane's part alone, or a copy that was put together, and nobody would see.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

_METHODS = """
    __dlpack__ as_strided as_strided_ backward data_ptr pin_memory register_hook
    register_post_accumulate_grad_hook requires_grad_ resize_ resize_as_ retain_grad set_
    share_memory_ storage storage_offset storage_type stride typed_storage untyped_storage
"""
_READ = "grad grad_fn _version _base"
_WRITTEN = "grad data requires_grad"


def has_side_effects() -> list[Any]:
    """All of them."""
    methods = [getattr(Tensor, name) for name in _METHODS.split() if hasattr(Tensor, name)]
    read = [getattr(Tensor, name).__get__ for name in _READ.split()]
    written = [getattr(Tensor, name).__set__ for name in _WRITTEN.split()]
    return [*methods, *read, *written]
