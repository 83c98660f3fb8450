"""Other values and another precision in a module for a while, and then everything as it was.

The tensors stay the same objects, because recorded graphs, strategies and optimizers hold on to
them; only the memory behind them is exchanged. So nothing that a trial writes reaches the memory
that training uses, which a strategy may share with other processes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


def tensors_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers by name; what has several names by each of them."""
    return {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }


@contextmanager
def swapped(module: nn.Module, dtype: torch.dtype | None) -> Iterator[None]:
    """Inside, floating-point tensors of `module` are copies, in `dtype` if one is given.

    Afterwards its tensors, its gradients and the attributes of its submodules are those from
    before: a forward pass may count in plain attributes, or put new tensors in place of buffers.
    """
    tensors = list({id(tensor): tensor for tensor in tensors_of(module).values()}.values())
    memory = [(tensor, tensor.data, tensor.grad) for tensor in tensors]
    attributes = [(part, _copied(vars(part))) for part in module.modules()]
    try:
        for tensor in tensors:
            tensor.grad = None
            wanted = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
            # Through `data`, because the tensor itself must stay the same object with the same
            # hooks.
            tensor.data = tensor.data.to(wanted, copy=True)
        yield
    finally:
        for part, before in attributes:
            _restore(vars(part), before)
        for tensor, data, gradient in memory:
            tensor.grad = None  # of the other precision; it would refuse the memory from before
            tensor.data = data
            tensor.grad = gradient


def _copied(attributes: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Each value, and what was in it if it is a container."""
    return {
        name: (value, value.copy() if isinstance(value, (dict, list, set)) else None)
        for name, value in attributes.items()
    }


def _restore(attributes: dict[str, Any], before: Mapping[str, tuple[Any, Any]]) -> None:
    for name in [name for name in attributes if name not in before]:
        del attributes[name]
    for name, (value, content) in before.items():
        if isinstance(value, list):
            value[:] = content
        elif isinstance(value, set) or (isinstance(value, dict) and not _same(value, content)):
            value.clear()
            value.update(content)
        attributes[name] = value


def _same(one: Mapping[Any, Any], other: Mapping[Any, Any]) -> bool:
    """By identity: values may be tensors, which compare number by number."""
    return list(one) == list(other) and all(one[key] is other[key] for key in one)
