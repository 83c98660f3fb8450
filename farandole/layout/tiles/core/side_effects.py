"""Functions that do something to a tensor, or show where it lies: not for tensors that are divided.

Such a function would reach this shard's part alone, or a temporary copy, without any error.

Tensors that are whole on every shard look as in the plain model, but each shard has only a part of
their gradient: what a shard has made of its tile. So hooks are not for them either.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch.overrides import TorchFunctionMode

from farandole.errors import UserError
from farandole.layout.tiles.core.flow import Flow
from farandole.layout.tiles.core.refusals import function_name, refuse
from farandole.layout.tiles.core.tile import Divided

_OURS = __name__.partition(".")[0]

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
        if func in _OF_GRADIENTS:
            leaves = pytree.tree_leaves((args, kwargs))
            tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
            if any(isinstance(each, Divided) for each in tensors):
                raise refuse(self._flow, func)
            if any(each.requires_grad and not each.is_leaf for each in tensors) and not (
                func is torch.autograd.grad and _is_of_weights_alone(tensors)
            ):
                raise UserError(
                    f"{self._flow.layer}: {function_name(func)} would see a part of the gradient: "
                    "every worker has that of its own tile, and they are added up at the end of "
                    "a step. Set hooks on weights before training, do this in the loss, or train "
                    "this model without tiles."
                )
        return func(*args, **(kwargs or {}))


def _is_of_weights_alone(tensors: Sequence[Tensor]) -> bool:
    """Whether nothing that was exchanged among shards is in their graphs: then every shard computes
    the same gradient, and all of it."""
    seen = {each.grad_fn for each in tensors if each.grad_fn is not None}
    waiting = list(seen)
    while waiting:
        node: Any = waiting.pop()
        kind = getattr(node, "_forward_cls", None)
        # An autograd function of this library in the graph is an exchange: below it, gradients are
        # those of one shard's tile.
        if kind is not None and kind.__module__.partition(".")[0] == _OURS:
            return False
        for below, _ in node.next_functions:
            if below is not None and below not in seen:
                seen.add(below)
                waiting.append(below)
    return True
