"""Calls of `torch.autograd.Function.apply`, for those who record or distribute a computation.

`__torch_function__` and torch.fx see the operations of the function's forward, and its own backward
is lost without a word. Here such a call is seen as one operation, in which the function's forward
and backward run as they are written. How it is seen: `apply_hook`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch.autograd.function import Function

from farandole.layout.recording.apply_hook import watched


class CustomFunction:
    """An `autograd.Function` as an operation that a graph can hold. Calling it is `apply`."""

    def __init__(self, function: Any) -> None:
        self.function = function
        self.__name__ = function.__name__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function.apply(*args, **kwargs)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CustomFunction) and other.function is self.function

    def __hash__(self) -> int:
        return hash(self.function)


Concerns = Callable[[list[Any]], bool]
"""Whether a call is one to be seen, by its arguments in a row. Calls of other threads are asked
about too."""
Handle = Callable[[CustomFunction, tuple[Any, ...], dict[str, Any]], Any]
"""Is given the call, and returns its result."""


@contextmanager
def custom_functions_seen(concerns: Concerns, handle: Handle) -> Iterator[None]:
    """Inside, calls of `apply` that are of concern go to `handle`.

    For one thread at a time: see `process_lock`.
    """

    def seen(kind: type[Function], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if concerns(pytree.tree_leaves((args, kwargs))):
            return handle(CustomFunction(kind), args, kwargs)
        return NotImplemented

    with watched(seen):
        yield


def is_under_transform() -> bool:
    """Whether `vmap` or another transform of torch.func is at work here."""
    return torch._C._functorch.peek_interpreter_stack() is not None
