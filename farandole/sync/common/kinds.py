"""Whether tensors are of the same kinds as others were.

What follows from shapes, strides, dtypes and devices is worked out once and kept, as long as the
tensors of a step are like those of the step before. This runs in every step for hundreds of
tensors. What decides for `torch.compile` whether it must compile again compares them in one call, a
fifth of the time that lists of their properties take; where it does not find them alike, those do.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Protocol

import torch

_PROPERTIES = [attrgetter(name) for name in ("dtype", "layout", "device", "shape")]


_MOST_ATTEMPTS = 4  # to make guards takes as long as some comparisons by lists


class _Guards(Protocol):
    def check(self, *tensors: object) -> bool:
        """Whether each is like the one in its place. They are as many."""


class Kinds:
    """Dtype, layout, device, shape and strides of each tensor of a list; all have strides."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._properties = [list(map(get, tensors)) for get in _PROPERTIES]
        self._strides = list(map(torch.Tensor.stride, tensors))
        self._guards = _guards(tensors)
        self._attempts = _MOST_ATTEMPTS

    def fit(self, tensors: Sequence[torch.Tensor | None]) -> bool:
        """Whether all of `tensors` are there, and each is of the kind of the one in its place."""
        if len(tensors) != len(self._strides):
            return False
        if self._guards is not None and self._guards.check(*tensors):
            return True
        try:
            for get, known in zip(_PROPERTIES, self._properties, strict=True):
                if list(map(get, tensors)) != known:
                    return False
        except AttributeError:  # of a None
            return False
        # Last: a tensor of another layout may have none.
        if list(map(torch.Tensor.stride, tensors)) != self._strides:  # type: ignore[arg-type]
            return False
        # They differ in something else: made under autocast, or with a graph of their own.
        if self._attempts:
            self._attempts -= 1
            self._guards = _guards(tensors)  # type: ignore[arg-type]
        return True


def _guards(tensors: Sequence[torch.Tensor]) -> _Guards | None:
    """None in a PyTorch that has them no longer, or others: they are no part of its interface."""
    try:
        from torch._C._dynamo.guards import TensorGuards

        found: _Guards = TensorGuards(
            *tensors,
            dynamic_dims_sizes=[list(tensor.shape) for tensor in tensors],  # type: ignore[misc]
            dynamic_dims_strides=[list(tensor.stride()) for tensor in tensors],  # type: ignore[misc]
        )
        return found if found.check(*tensors) else None
    except (ImportError, TypeError, ValueError, SystemError):
        return None
