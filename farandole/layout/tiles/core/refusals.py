"""Errors about functions that a divided tensor cannot be given to. Each names the layer."""

from __future__ import annotations

from typing import Any

from farandole.errors import UserError
from farandole.layout.tiles.core.flow import Flow, Handler


def function_name(function: Any) -> str:
    """As a user knows it."""
    name = str(getattr(function, "__name__", function))
    if name in ("__get__", "__set__"):  # of an attribute
        name = str(getattr(getattr(function, "__self__", None), "__name__", name))
    return name


def refuse(flow: Flow, function: Any) -> UserError:
    """The error for a function that would reach this shard's part alone, or a copy of it."""
    return UserError(
        f"{flow.layer}: {function_name(function)} is not possible with a tensor that is divided "
        "among workers: it would see or change this worker's part only. Write it as a function "
        "with a result, leave it away, or train this model without tiles."
    )


def refuse_below(flow: Flow, function: Any) -> UserError:
    """The error for a call that did not come through the functions of torch that Python calls."""
    name = function_name(function).partition(".")[0]
    return UserError(
        f"{flow.layer}: {name} is computed inside of torch.func (vmap, grad, jvp), torch.jit, a "
        "subclass of torch.Tensor or a compiled extension, with a tensor that is divided among "
        "workers. These see a tensor's memory, and each worker has a part of it. Call torch's "
        "functions directly, end the tiles before this layer with handoff=…, or train this model "
        "without tiles."
    )


def refused(function: Any) -> Handler:
    """Of a function that cannot be called with a tile."""

    def handler(flow: Flow, *args: Any, **kwargs: Any) -> Any:
        raise refuse(flow, function)

    return handler


class Invalidated:
    """Stands in for the flow of a divided tensor that must not be used any more."""

    def __init__(self, flow: Flow, function: Any) -> None:
        self._said = (
            f"{flow.layer}: {function_name(function)} has changed a tensor in place that is a view "
            "of another, which is divided among workers and is used again later. Write it as a "
            "function with a result (x = x + …, torch.relu(x))."
        )

    def check(self) -> None:
        raise UserError(self._said)

    def __getattr__(self, name: str) -> Any:
        raise UserError(self._said)
