"""Functions that do something to a tensor, or show where it lies: not for tensors that are divided.

They would reach this lane's part alone, or a copy that was put together, and nobody would see.

Tensors that are whole on every lane look as in the plain model, but each lane has only a part of
their gradient: what a lane has made of its tile. So hooks are not for them either.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch.overrides import TorchFunctionMode

from farandole.layout.tiles.tile import Divided, Flow, refuse

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
    return [*methods, *read, *written, torch.autograd.grad, torch.autograd.backward]


_OF_GRADIENTS = (
    Tensor.register_hook,
    Tensor.retain_grad,
    Tensor.backward,
    torch.autograd.grad,
    torch.autograd.backward,
)


class WholeGradientsOnly(TorchFunctionMode):
    """Inside, a model's code cannot look at the gradient of what is computed from weights.

    Hooks on the weights themselves are looked after elsewhere.
    """

    def __init__(self, flow: Flow) -> None:
        super().__init__()
        self._flow = flow

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in _OF_GRADIENTS and any(
            isinstance(leaf, Divided) or (leaf.requires_grad and not leaf.is_leaf)
            for leaf in pytree.tree_leaves((args, kwargs))
            if isinstance(leaf, Tensor)
        ):
            raise refuse(self._flow, func)
        return func(*args, **(kwargs or {}))
