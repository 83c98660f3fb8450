"""What a script hands over: a torch or Keras model, or tensors and arrays of any framework."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from farandole.comm.buffers import from_buffer
from farandole.errors import UserError


def parameters_of(given: Any) -> dict[str, torch.Tensor]:
    """Tensors by name, over the memory of what was given where it lends it."""
    if isinstance(given, nn.Module) and not is_keras(given):
        return {**dict(given.named_parameters()), **dict(given.named_buffers())}
    if is_keras(given):
        from farandole.keras.weights import tensor_of

        return {variable.path: tensor_of(variable) for variable in given.variables}
    return {str(index): from_buffer(value) for index, value in enumerate(_listed(given))}


def is_keras(given: Any) -> bool:
    """Keras's models are torch modules too, with its torch backend."""
    return any(kind.__module__.split(".")[0] == "keras" for kind in type(given).__mro__)


def gradients_of(given: Any) -> list[torch.Tensor]:
    """The gradients of a torch model, or the tensors of a list. Raises `UserError` naming a
    parameter that has none: which ones have may differ between ranks."""
    if not isinstance(given, nn.Module):
        listed = _listed(given)
        if any(gradient is None for gradient in listed):
            at = next(index for index, gradient in enumerate(listed) if gradient is None)
            raise UserError(f"gradient {at} is None: leave it out on all ranks, or give zeros.")
        return [from_buffer(gradient, writable=True) for gradient in listed]
    trained = {n: p for n, p in given.named_parameters() if p.requires_grad}
    missing = [name for name, parameter in trained.items() if parameter.grad is None]
    if missing:
        raise UserError(
            f"{missing[0]!r} has no gradient: call gradients(model) between backward and step, and "
            "freeze what is not trained."
        )
    return [parameter.grad for parameter in trained.values() if parameter.grad is not None]


def _listed(given: Any) -> list[Any]:
    if isinstance(given, dict):
        return list(given.values())
    if not isinstance(given, Iterable) or hasattr(given, "shape"):
        return [given]
    return list(given)
