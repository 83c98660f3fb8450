"""What decides what a model's code does, beside its arguments: all that a recording cannot see.

A recorder compares it before and after, for a recording is only right if none of it changes.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn


class CannotRecordError(Exception):
    """The code does something that may be different for another batch."""


@contextmanager
def as_if_compiling() -> Iterator[None]:
    """Inside, `torch.compiler.is_compiling()` is true: libraries ask it before they look at values
    to save work, as Hugging Face's masks do, and then go the way that is right for all values."""
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before


def surroundings() -> tuple[Any, ...]:
    """What decides how an operation is computed, beside its arguments."""
    kinds = ("cpu", "cuda")
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        *((torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds),
    )


def drawn_elsewhere() -> tuple[Any, ...]:
    """Random states that a recording does not see."""
    _, keys, *rest = np.random.get_state()
    return random.getstate(), np.asarray(keys).tobytes(), rest


def forget(tensor: torch.Tensor) -> None:
    """Nothing is kept for a backward that never comes."""


def recall(nothing: None) -> torch.Tensor:
    raise CannotRecordError("its code computes gradients")


def attributes_of(module: nn.Module) -> dict[str, Any]:
    """What a module has, by identity: what must not change in its forward."""
    found: dict[str, Any] = {}
    for name, value in vars(module).items():
        if name == "_compiled_call_impl":
            continue
        held: Any = ()
        if isinstance(value, dict):
            held = tuple((key, id(each)) for key, each in value.items())
        elif isinstance(value, (list, tuple, set)):
            held = tuple(map(id, value))
        # Small numbers and strings may be made anew, and are the same.
        same = value if type(value) in (bool, int, float, str) else id(value)
        found[name] = (same, held)
    return found
