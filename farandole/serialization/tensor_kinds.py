"""Tensors that are no plain leaves, arrays and byte strings.

A leaf is a dense tensor without a gradient. Sparse tensors, parameters and arrays of any dtype are
taken apart until only leaves remain.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from farandole.serialization.kind import CannotSerialize, Kind, content_only
from farandole.serialization.sparse import checked_sparse

DTYPES: Mapping[str, torch.dtype] = {
    str(dtype): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and not str(dtype).startswith(("torch.q", "torch.bits"))
}
_ARRAY_KINDS = "biufcSUmM"  # the bytes of others could be taken for addresses


def is_leaf(tensor: torch.Tensor) -> bool:
    return not (tensor.requires_grad or _is_unusual(tensor)) and tensor.layout is torch.strided


def _is_unusual(tensor: torch.Tensor) -> bool:
    odd = tensor.is_quantized or tensor.is_nested or tensor.is_meta
    return odd or str(tensor.dtype) not in DTYPES


def _tensor_apart(tensor: torch.Tensor) -> tuple[Any, Any]:
    if tensor.is_meta:
        raise CannotSerialize("It has no numbers; send its shape and dtype.")
    if _is_unusual(tensor):
        raise CannotSerialize("Send its numbers as an ordinary tensor.")
    plain = tensor.detach()
    if tensor.layout is torch.sparse_coo:
        # Not `indices()`: that is for coalesced tensors only.
        detail = (tensor.requires_grad, tuple(tensor.shape), tensor.is_coalesced())
        return detail, [plain._indices(), plain._values()]
    if tensor.layout is not torch.strided:
        raise CannotSerialize("Send tensor.to_dense() or tensor.to_sparse_coo().")
    return None, plain


def _tensor_together(detail: Any, content: Any) -> torch.Tensor:
    if detail is None:
        dense: torch.Tensor = content.requires_grad_()
        return dense
    differentiable, shape, is_coalesced = detail
    indices, values = content
    tensor = checked_sparse(indices, values, shape, is_coalesced=is_coalesced)
    return tensor.requires_grad_(differentiable)


def _array_apart(array: np.ndarray[Any, Any]) -> tuple[Any, Any]:
    if array.dtype.kind not in _ARRAY_KINDS:
        raise CannotSerialize("Send array.tolist(), or an array for each field.")
    return (array.dtype.str, array.shape), array.tobytes()


def _array_together(detail: Any, content: Any) -> Any:
    text, shape = detail
    dtype = np.dtype(text)
    if dtype.kind not in _ARRAY_KINDS:
        raise ValueError(f"{text} is no dtype of numbers or text")
    check_bytes(len(content), shape, dtype.itemsize)
    if not content:
        return np.empty(shape, dtype)
    return np.frombuffer(bytearray(content), dtype).reshape(shape)


def check_bytes(count: int, shape: tuple[int, ...], itemsize: int) -> None:
    """Raises `ValueError` unless so many bytes fill the shape."""
    if min(shape, default=0) < 0 or count != math.prod(shape) * itemsize:
        raise ValueError(f"{count} bytes are not {tuple(shape)} of {itemsize} bytes each")


def bytes_tensor(row: bytearray) -> torch.Tensor:
    """A tensor of bytes in the same memory. PyTorch cannot make one of no bytes."""
    return torch.frombuffer(row, dtype=torch.uint8) if row else torch.empty(0, dtype=torch.uint8)


def _bytes_together(row: torch.Tensor) -> bytes:
    if row.dtype is not torch.uint8:
        raise ValueError(f"{row.dtype} is no type of bytes")
    return row.numpy().tobytes()


TENSOR_KINDS: Mapping[type, Kind] = {
    bytes: content_only(lambda value: bytes_tensor(bytearray(value)), _bytes_together),
    # A view of the bytes first: of a number, bytearray would make as many zeros.
    bytearray: content_only(bytes, lambda content: bytearray(memoryview(content))),
    torch.Size: content_only(list, torch.Size),
    torch.dtype: content_only(str, lambda name: DTYPES[name]),
    torch.device: content_only(str, torch.device),
    torch.Tensor: Kind(_tensor_apart, _tensor_together),
    nn.Parameter: Kind(
        lambda value: (value.requires_grad, value.detach()),
        lambda differentiable, tensor: nn.Parameter(tensor, requires_grad=differentiable),
    ),
    np.ndarray: Kind(_array_apart, _array_together),
}

NUMPY_SCALAR = Kind(
    lambda value: _array_apart(np.asarray(value)),
    lambda detail, content: _array_together(detail, content)[()],
)
