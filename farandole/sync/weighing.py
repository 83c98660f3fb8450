"""A batch counts for what it holds.

A rank's batch may be larger or smaller than the average one, at the end of an epoch above all. Its
weight scales the gradient where it enters the model, at the output, so it is exact under
accumulation and shared BatchNorm too. Where the gradient leaves the model, at an input, the weight
is taken out again: the input may be the output of another distributed model, such as a generator's
image at its discriminator.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn


class Weighing:
    """Scales the gradients of the modules that it follows by the weight of the batch."""

    def __init__(self) -> None:
        self.weight = 1.0

    def follow(self, module: nn.Module) -> None:
        module.register_forward_pre_hook(self._unweigh_inputs, with_kwargs=True)
        module.register_forward_hook(self._weigh_output)

    def _unweigh_inputs(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        return (args, kwargs) if self.weight == 1.0 else _scaled((args, kwargs), 1 / self.weight)

    def _weigh_output(self, module: nn.Module, args: Any, output: Any) -> Any:
        return output if self.weight == 1.0 else _scaled(output, self.weight)


class Replica(nn.Module):
    """What the user calls where there is no DDP around their model; `module` is theirs, as there.

    `through` is called in its place, if it is set: something that wraps the same model.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.through: Callable[..., Any] | None = None
        self.before: Callable[[], None] = _nothing

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.before()
        return (self.through or self.module)(*args, **kwargs)


def _nothing() -> None:
    pass


def _scaled(value: Any, factor: float) -> Any:
    """The same value; gradients that flow back through its tensors are multiplied by `factor`."""

    def scaled(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
            # A copy, because the hook must not outlive the step on a parameter that the model
            # returns as it is, nor touch gradients that reach an input by another way.
            leaf = leaf.clone()
            leaf.register_hook(functools.partial(torch.mul, factor))
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            leaf = copy.copy(leaf)
            for field in dataclasses.fields(leaf):
                object.__setattr__(leaf, field.name, _scaled(getattr(leaf, field.name), factor))
        return leaf

    return pytree.tree_map(scaled, value)
