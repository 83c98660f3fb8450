"""Whether tensors are of the same kinds as others were.

What follows from shapes, strides, dtypes and devices is worked out once and kept, as long as the
tensors of a step are like those of the step before. This runs in every step for hundreds of
tensors: lists that are made and compared without a loop in Python take half as long as with one.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

import torch

_PROPERTIES = [attrgetter(name) for name in ("dtype", "layout", "device", "shape")]


class Kinds:
    """Dtype, layout, device, shape and strides of each tensor of a list; all have strides."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._properties = [list(map(get, tensors)) for get in _PROPERTIES]
        self._strides = list(map(torch.Tensor.stride, tensors))

    def fit(self, tensors: Sequence[torch.Tensor | None]) -> bool:
        """Whether all of `tensors` are there, and each is of the kind of the one in its place."""
        try:
            for get, known in zip(_PROPERTIES, self._properties, strict=True):
                if list(map(get, tensors)) != known:
                    return False
        except AttributeError:  # of a None
            return False
        # Last: a tensor of another layout may have none.
        return list(map(torch.Tensor.stride, tensors)) == self._strides  # type: ignore[arg-type]
