"""Gradients of TensorFlow, in eager code and in graphs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from farandole.comm.buffers import from_buffer, to_array


def through_graph(grads: Sequence[Any], variables: Sequence[Any], on_host: Any) -> list[Any]:
    """What `on_host` returns for them. In a graph it is called in TensorFlow's order of effects."""
    known = [index for index, grad in enumerate(grads) if grad is not None]
    # Gradients of embeddings are rows and their indices: they travel dense.
    dense = [tf.convert_to_tensor(grads[index]) for index in known]

    def call(*tensors: Any) -> list[Any]:
        given: list[Any] = [None] * len(grads)
        for index, tensor in zip(known, tensors, strict=True):
            given[index] = from_buffer(tensor)
        return [tf.constant(to_array(averaged)) for averaged in on_host(given)]

    results = tf.py_function(call, dense, [variable.dtype for variable in variables])
    for result, variable in zip(results, variables, strict=True):
        result.set_shape(variable.shape)
    return list(results)
