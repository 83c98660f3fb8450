"""Gradients of JAX, in eager code and inside of `jit`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import io_callback

from farandole.comm.buffers import from_buffer, to_array


def begin_in_order() -> None:
    """Collectives that callbacks begin come in the order of the program on all ranks."""
    jax.config.update("jax_cpu_enable_async_dispatch", False)


def through_jit(grads: Sequence[Any], variables: Sequence[Any], on_host: Any) -> list[Any]:
    known = [index for index, grad in enumerate(grads) if grad is not None]

    def call(*arrays: Any) -> list[Any]:
        given: list[Any] = [None] * len(grads)
        for index, array in zip(known, arrays, strict=True):
            given[index] = from_buffer(array)
        return [to_array(averaged) for averaged in on_host(given)]

    arrays = [grads[index] for index in known]
    if not any(isinstance(array, jax.core.Tracer) for array in arrays):
        return [jnp.array(array) for array in call(*arrays)]
    kinds = [jax.ShapeDtypeStruct(tuple(v.shape), v.dtype) for v in variables]
    results: list[Any] = io_callback(call, kinds, *arrays, ordered=True)
    return list(results)
