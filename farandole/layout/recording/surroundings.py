"""What decides what a model's code does, beside its arguments: all that a recording cannot see.

A recorder compares it before and after, for a recording is only right if none of it changes.
"""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.modules import module as of_all_modules

from farandole.layout.recording.reasons import CannotRecordError, is_the_model

_QUESTIONS = ("is_grad_enabled", "is_inference_mode_enabled", "is_autocast_enabled")


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


def has_hooks(module: nn.Module) -> bool:
    """Whether more than its forward runs when a module is called."""
    own = (
        module._forward_hooks,
        module._forward_pre_hooks,
        module._backward_hooks,
        module._backward_pre_hooks,
    )
    return any(own) or bool(of_all_modules._has_any_global_hook())


@contextmanager
def questions_refused(now: Callable[[], bool]) -> Iterator[None]:
    """Inside, the model's code cannot ask whether gradients are computed, or in which precision:
    in training the answer is another one than in evaluation. For one thread at a time.

    `now`: whether what runs is recorded.
    """
    thread = threading.get_ident()

    def refusing(name: str, ask: Callable[..., Any]) -> Callable[..., Any]:
        def answer(*args: Any, **kwargs: Any) -> Any:
            asked_by = sys._getframe(1).f_code.co_filename
            # torch itself asks all the time, and so do other threads; only the model's own code is
            # refused.
            if threading.get_ident() == thread and now() and is_the_model(asked_by):
                raise CannotRecordError(f"its code depends on torch.{name}()")
            return ask(*args, **kwargs)

        return answer

    questions = {name: getattr(torch, name) for name in _QUESTIONS}
    try:
        for name, ask in questions.items():
            setattr(torch, name, refusing(name, ask))
        yield
    finally:
        for name, ask in questions.items():
            setattr(torch, name, ask)
