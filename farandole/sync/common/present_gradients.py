"""The gradients that a step would apply, and where they are.

This runs in every step, for every parameter. In nearly all steps the gradients on a device are of
the same kinds as in the step before, and what is known of those holds for them.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn

from farandole.sync.common.kinds import Kinds

_gradient = operator.attrgetter("grad")
_DENSE = torch.strided
_PLAIN = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16})


class Present(NamedTuple):
    """Parameters that have gradients, and the numbers of each gradient in the same order."""

    parameters: Sequence[nn.Parameter] = ()
    gradients: Sequence[torch.Tensor] = ()
    kinds: Kinds | None = None
    """The gradients'. The same object as in an earlier step: they are of the same kinds."""


class PresentGradients:
    """Finds them, and remembers what those on devices were like in the last step.

    On the CPU nothing more depends on their kinds, and to compare those takes as long as to sort.
    """

    def __init__(self) -> None:
        self._kinds: Kinds | None = None  # where all were on devices

    def find(self, parameters: Sequence[nn.Parameter]) -> tuple[Present, Present]:
        """Those of `parameters` that have any, on the CPU and on devices."""
        gradients = list(map(_gradient, parameters))
        if self._kinds is not None and self._kinds.fit(gradients):
            return Present(), Present(parameters, gradients, self._kinds)
        on_cpu, on_device = _sorted(parameters, gradients)
        found = on_device.gradients
        as_they_are = len(found) == len(gradients) and all(map(operator.is_, found, gradients))
        self._kinds = Kinds(found) if as_they_are else None
        return on_cpu, on_device


def _sorted(
    parameters: Sequence[nn.Parameter], gradients: Sequence[torch.Tensor | None]
) -> tuple[Present, Present]:
    on_cpu, on_device = Present([], []), Present([], [])
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if gradient is None:
            continue
        if gradient.layout is not _DENSE or gradient.dtype not in _PLAIN:
            gradient = _numbers(gradient)
        if gradient.numel():
            here = on_cpu if gradient.is_cpu else on_device
            here.parameters.append(parameter)  # type: ignore[attr-defined]
            here.gradients.append(gradient)  # type: ignore[attr-defined]
    return on_cpu, on_device


def _numbers(gradient: torch.Tensor) -> torch.Tensor:
    """What is in it: only some rows, where it is sparse."""
    values = gradient._values() if gradient.is_sparse else gradient
    return torch.view_as_real(values.resolve_conj()) if values.is_complex() else values
