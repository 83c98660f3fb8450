"""A hook on a model that copies and pickles of the model do not take along."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn


class ForwardHook:
    """Calls `function` before each forward pass of the module that it is registered on.

    What it calls belongs to this run: a copy of the model (an average over time, say) must not, and
    `torch.save(model)` could not. Both get a stand-in that returns the inputs as they are. It is
    made of Python's own parts, so that a pickle can be read where Farandole is not installed.
    """

    def __init__(self, function: Callable[[], None]) -> None:
        self._function = torch.compiler.disable(function)  # it runs beside a compiled graph

    def __call__(self, module: nn.Module, args: Any) -> None:
        self._function()

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[[nn.Module, Any], Any]:
        return functools.partial(dict.get, {})  # get(module, args): args

    def __reduce__(self) -> Any:
        return functools.partial, (dict.get, {})
