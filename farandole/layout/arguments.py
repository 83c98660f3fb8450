"""What a model's forward is given: positional and keyword arguments.

A script says it by what it passes as inputs: a tuple or a list are the positional arguments of
`forward`, a dictionary its keyword arguments, and anything else is its one argument.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import nn


class Arguments(NamedTuple):
    """The arguments of one call of the model. torch's pytrees cut and move it like any nest."""

    positional: tuple[Any, ...]
    named: dict[str, Any]


def arguments_of(inputs: Any) -> Arguments:
    """The arguments that a script's inputs stand for."""
    if isinstance(inputs, Arguments):
        return inputs
    if isinstance(inputs, Mapping):
        return Arguments((), dict(inputs))
    if isinstance(inputs, (tuple, list)):
        return Arguments(tuple(inputs), {})
    return Arguments((inputs,), {})


def call(module: nn.Module, value: Any) -> Any:
    """Calls a block: the first one with the model's arguments, others with what came before."""
    if isinstance(value, Arguments):
        return module(*value.positional, **value.named)
    return module(value)
