"""TensorFlow itself, imported in one place, and what Farandole asks of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from farandole.errors import UserError

try:
    import tensorflow as tf
except ModuleNotFoundError as error:
    if error.name != "tensorflow":
        raise
    raise ModuleNotFoundError(
        "horovod.tensorflow needs TensorFlow 2.16 or newer: pip install 'farandole[tensorflow]'",
        name="tensorflow",
    ) from error

__all__ = ["as_dense", "as_tensor", "as_tensors", "tf", "unconverted"]

unconverted = tf.autograph.experimental.do_not_convert
"""Marks what is Python also inside a `tf.function`: TensorFlow would rewrite every function that is
called there, and all that it calls, and then run the slower ones."""

if tuple(int(part) for part in tf.__version__.split(".")[:2]) < (2, 16):
    raise ImportError(
        f"TensorFlow {tf.__version__} is too old for horovod.tensorflow, which needs 2.16 or newer "
        "(with Keras 3): pip install 'farandole[tensorflow]'"
    )


def as_tensor(value: Any, what: str) -> Any:
    """A dense tensor of numbers; variables are read. Raises `UserError` for anything else."""
    if value is None:
        raise UserError(f"{what} wants a tensor, not None. Leave out what has no gradient.")
    if isinstance(value, torch.Tensor):
        raise UserError(
            f"{what} of horovod.tensorflow was given a torch.Tensor. Use horovod.torch for it: "
            "both can be used in one process, and share what hvd.init() has begun."
        )
    if isinstance(value, (tf.RaggedTensor, tf.SparseTensor)):
        raise UserError(
            f"{what} cannot take a {type(value).__name__}: its rows need not be the same on all "
            "ranks. Make it dense with to_tensor() or tf.sparse.to_dense()."
        )
    tensor = tf.convert_to_tensor(value)
    if not tensor.dtype.is_numpy_compatible or tensor.dtype == tf.string:
        raise UserError(f"{what} cannot take {tensor.dtype.name}s. Send them by broadcast_object.")
    return tensor


def as_tensors(values: Any, what: str) -> list[Any]:
    if not isinstance(values, Sequence):
        raise UserError(f"{what} wants a list of tensors, not a {type(values).__name__}.")
    if not values:
        raise UserError(f"{what} wants at least one tensor.")
    return [as_tensor(value, what) for value in values]


def as_dense(gradient: Any) -> Any:
    """`tf.IndexedSlices` as the tensor that they stand for; anything else as it is."""
    return tf.convert_to_tensor(gradient) if isinstance(gradient, tf.IndexedSlices) else gradient
