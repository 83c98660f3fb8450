"""Parameters that are frozen now, and may be thawed by the script at any moment.

Some scripts freeze a model for a part of every step, such as the discriminator of a GAN while the
generator learns. PyTorch refuses hooks on what needs no gradient, but keeps those that are there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


def can_be_trained(parameter: torch.Tensor) -> bool:
    """Whether it is trained, or would be if it were thawed."""
    has_gradients = parameter.is_floating_point() or parameter.is_complex()
    return has_gradients and not parameter.is_inference()


@contextmanager
def thawed(parameter: nn.Parameter) -> Iterator[None]:
    """Inside it needs a gradient; afterwards as before."""
    before = parameter.requires_grad
    parameter.requires_grad_(True)
    try:
        yield
    finally:
        parameter.requires_grad_(before)


def accumulator(parameter: nn.Parameter) -> Any:
    """The node of the graph that adds to `parameter.grad`. Somebody must hold it: PyTorch takes
    the one that is there, and else makes another."""
    with thawed(parameter), torch.enable_grad():
        function = parameter.view_as(parameter).grad_fn
    assert function is not None
    return function.next_functions[0][0]
