"""What a Keras model and its optimizer hold: which of it is trained, and how it is written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import keras
import torch

from farandole.comm.buffers import from_buffer, to_array


class Weights:
    """The variables of a model and its optimizer, by name.

    `frozen` are those that no strategy averages: seeds, counters, the learning rate. Statistics are
    the moving ones of BatchNormalization.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        optimizer = model.optimizer
        statistics = {id(v) for layer in _layers(model) for v in _moving(layer)}
        rest = model.non_trainable_variables
        self.trained = _named(model.trainable_variables)
        self.statistics = _named([v for v in rest if id(v) in statistics])
        self.slots = _named([v for v in optimizer.variables if _is_slot(v)])
        counters = [v for v in optimizer.variables if not _is_slot(v)]
        self.frozen = _named([*(v for v in rest if id(v) not in statistics), *counters])

    @property
    def variables(self) -> list[Any]:
        """All but the slots, in the order of a mirror's values."""
        return [*self.trained.values(), *self.frozen.values(), *self.statistics.values()]

    def settle(self) -> None:
        """With JAX, `fit` holds the values itself until a callback asks for them."""
        if keras.backend.backend() == "jax":
            self._model.jax_state_sync()

    def values(self) -> list[torch.Tensor]:
        self.settle()
        return [tensor_of(variable) for variable in self.variables]

    def slot_values(self) -> dict[str, torch.Tensor]:
        return {name: tensor_of(variable) for name, variable in self.slots.items()}

    def assign(self, values: Sequence[torch.Tensor], slots: Mapping[str, torch.Tensor]) -> None:
        """Writes values of this order, and slots, into the variables."""
        self.settle()
        for variable, value in zip(self.variables, values, strict=True):
            assign(variable, value)
        for name, value in slots.items():
            assign(self.slots[name], value)


def tensors(variables: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    return {name: tensor_of(variable) for name, variable in variables.items()}


def tensor_of(variable: Any) -> torch.Tensor:
    """Its value; the same memory, where the backend lends it."""
    value = variable.value
    if isinstance(value, torch.Tensor):
        return value.detach()
    # TensorFlow's variables do not lend their memory, but their arrays do.
    return from_buffer(value if hasattr(value, "__dlpack__") else value.numpy())


def assign(variable: Any, value: torch.Tensor) -> None:
    mine = variable.value
    if isinstance(mine, torch.Tensor):
        with torch.no_grad():
            mine.copy_(value)
        return
    array = to_array(value)
    # A copy: the backend may go on with the memory that it is given, and the mirror writes to it.
    variable.assign(array.copy())


def _layers(model: Any) -> list[Any]:
    return list(model._flatten_layers()) if hasattr(model, "_flatten_layers") else model.layers


def _moving(layer: Any) -> list[Any]:
    names = ("moving_mean", "moving_variance")
    if not isinstance(layer, keras.layers.BatchNormalization):
        return []
    return [getattr(layer, name) for name in names if getattr(layer, name, None) is not None]


def _named(variables: Sequence[Any]) -> dict[str, Any]:
    return {variable.path: variable for variable in variables}


def _is_slot(variable: Any) -> bool:
    return len(variable.shape) > 0 and "float" in str(variable.dtype)
