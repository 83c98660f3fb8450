"""An optimizer's gradients on their way to `apply`: handed to the host, whatever the backend.

Every backend's training step calls `optimizer.apply(grads, variables)`: torch and TensorFlow from
`train_step`, JAX through `stateless_apply`, inside of `jit`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import torch

OnHost = Callable[[Sequence[torch.Tensor | None]], list[torch.Tensor]]


def average_in(optimizer: Any, on_host: OnHost) -> None:
    """From now on the optimizer applies what `on_host` returns for its gradients."""
    plain = optimizer.apply

    def apply(grads: Sequence[Any], trainable_variables: Any = None) -> Any:
        variables = optimizer._trainable_variables  # of which it was built
        if trainable_variables is not None:
            trainable_variables = list(trainable_variables)
            given = {id(v): g for v, g in zip(trainable_variables, grads, strict=True)}
            grads = [given.get(id(variable)) for variable in variables]
        return plain(_carried(list(grads), variables, on_host), variables)

    # Not by a subclass: the optimizer is saved under its own name, and loaded without us.
    object.__setattr__(optimizer, "apply", apply)


def _carried(grads: list[Any], variables: Sequence[Any], on_host: OnHost) -> list[Any]:
    backend = keras.backend.backend()
    if backend == "torch":
        return list(torch.compiler.disable(on_host)(grads))
    if backend == "tensorflow":
        from farandole.keras.tensorflow_backend import through_graph

        return through_graph(grads, variables, on_host)
    from farandole.keras.jax_backend import through_jit

    return through_jit(grads, variables, on_host)
