"""Tensors of TensorFlow and arrays of JAX go through a group's tensors, most without a copy."""

from __future__ import annotations

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf
import torch

from farandole.comm.buffers import from_buffer, to_array
from farandole.errors import UserError

TYPES = ["float64", "float32", "float16", "bfloat16", "int32", "uint32", "bool", "complex64"]


def tensorflow_pointer(tensor: tf.Tensor) -> int:
    pointer: int = torch.from_dlpack(tensor).data_ptr()
    return pointer


@pytest.mark.parametrize("dtype", TYPES)
def test_a_tensor_of_tensorflow_is_shared(dtype: str) -> None:
    given = tf.cast(tf.constant([[1.0, 0.0, 2.0]]), dtype)
    tensor = from_buffer(given)
    assert tensor.tolist() == given.numpy().tolist()
    assert tensor.data_ptr() == tensorflow_pointer(given)
    back = tf.experimental.dlpack.from_dlpack(tensor.__dlpack__())
    assert back.dtype == given.dtype
    assert tensorflow_pointer(back) == tensor.data_ptr()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32"])
def test_an_array_of_jax_is_shared(dtype: str) -> None:
    given = jnp.arange(4).astype(dtype)
    tensor = from_buffer(given)
    assert tensor.data_ptr() == given.unsafe_buffer_pointer()
    back = jnp.from_dlpack(tensor)
    assert back.dtype == given.dtype
    assert back.unsafe_buffer_pointer() == tensor.data_ptr()


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_narrow_floats_of_numpy(name: str) -> None:
    array = np.array([[1.0, 0.5], [2.0, -4.0]], getattr(ml_dtypes, name))
    tensor = from_buffer(array, writable=True)
    assert str(tensor.dtype) == f"torch.{name}"
    assert tensor.float().tolist() == array.astype(np.float32).tolist()
    back = to_array(tensor)
    assert back.dtype == array.dtype
    assert np.shares_memory(back, array)


def test_constants_are_not_written_to() -> None:
    for given in (tf.constant([1.0]), jnp.ones(1)):
        with pytest.raises(UserError, match="read-only"):
            from_buffer(given, writable=True)


def test_what_is_no_number_is_refused() -> None:
    with pytest.raises(UserError, match="a string tensor cannot be sent"):
        from_buffer(tf.constant(["a"]))
    with pytest.raises(UserError, match="rectangular"):
        from_buffer(tf.ragged.constant([[1.0], [2.0, 3.0]]))
    with pytest.raises(UserError, match="dtype int4"):
        from_buffer(np.zeros(2, ml_dtypes.int4))
