"""Memory of other frameworks as tensors that a group can carry: NumPy, DLPack, array interface.

A group works on torch tensors, whoever made the numbers: its transports add, compress and lay out
bytes with torch's kernels, and shared memory, gloo, NCCL and MPI are all reached through them. That
is why the front-ends for TensorFlow and JAX import torch too. What they do not need is a copy: a
torch tensor can be a view of somebody else's memory, and an array a view of a tensor.

    buffer ──▶ from_buffer ──▶ tensor ──▶ group ──▶ tensor ──▶ to_array ──▶ buffer

What cannot be shared is copied if the group only reads it, and refused by name if it must write.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import torch

from farandole.comm.tensors import kind_of
from farandole.errors import UserError

_NARROW: Final = {
    name: getattr(torch, name)
    for name in (
        "bfloat16",
        "float8_e4m3fn",
        "float8_e4m3fnuz",
        "float8_e5m2",
        "float8_e5m2fnuz",
        "float8_e8m0fnu",
    )
    if hasattr(torch, name)
}
"""Dtypes that NumPy has only through the package ml_dtypes, which TensorFlow and JAX install."""

_NO_NUMBERS: Final = ("string", "variant", "resource")  # dtypes of TensorFlow


def from_buffer(buffer: Any, *, writable: bool = False) -> torch.Tensor:
    """A tensor over the memory of `buffer`, or over a copy where the memory cannot be shared.

    `buffer` is a tensor, a NumPy array, whatever has `__dlpack__`, `__array_interface__` or
    `__array__` (arrays of JAX and CuPy, tensors of TensorFlow), a memoryview, or a number. Strides
    that torch does not have and foreign byte orders are copied.

    Without `writable` the tensor must not be written: the memory may be another's constant. With
    it, what cannot be shared for writing is refused, with the reason. Raises `UserError` for that,
    and for values that are no numbers (strings, objects, ragged rows).
    """
    if isinstance(buffer, torch.Tensor):
        return buffer
    kind = getattr(getattr(buffer, "dtype", None), "name", "")
    if kind in _NO_NUMBERS:  # asked for its memory, TensorFlow would end the process
        raise UserError(f"a {kind} tensor cannot be sent. Give numbers in one rectangular array.")
    if isinstance(buffer, (np.ndarray, np.generic)):
        return _from_array(np.asarray(buffer), writable)
    if writable:
        return _from_array(_lent(buffer), writable=True)
    shared = _by_dlpack(buffer)
    return _from_array(_as_array(buffer), writable=False) if shared is None else shared


def to_array(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """An array over the memory of `tensor`; a copy of it where it is on a GPU or is a lazy view.

    Frameworks that read DLPack need no array: they take the tensor itself.

    Raises `UserError` for a dtype that NumPy does not have, where ml_dtypes is not installed.
    """
    here = tensor.detach().cpu().resolve_neg().resolve_conj()
    name = kind_of(here.dtype)
    if name not in _NARROW:
        return here.numpy()
    try:
        import ml_dtypes
    except ModuleNotFoundError:
        raise UserError(f"NumPy has no {name} without the package ml_dtypes: install it.") from None
    width: torch.dtype = torch.int16 if here.element_size() == 2 else torch.uint8
    return here.contiguous().view(width).numpy().view(getattr(ml_dtypes, name))


def _by_dlpack(buffer: Any) -> torch.Tensor | None:
    """None where the buffer has no such interface, or does not lend its memory through it."""
    if not hasattr(buffer, "__dlpack__"):
        return None
    try:
        shared: torch.Tensor = torch.from_dlpack(buffer)
    except Exception:  # each framework raises its own: read-only, a dtype that DLPack lacks, …
        return None  # NumPy may know a way
    return shared


def _lent(buffer: Any) -> np.ndarray[Any, Any]:
    """The memory of a buffer for writing. NumPy is asked, since torch does not see which memory is
    read-only, as that of JAX's arrays is."""
    if isinstance(buffer, (bytearray, memoryview)) or hasattr(buffer, "__array_interface__"):
        return _as_array(buffer)
    why = "it does not give its memory away"
    if hasattr(buffer, "__dlpack__"):
        try:
            return np.from_dlpack(buffer)
        except Exception as error:  # each framework raises its own
            why = str(error)
    raise UserError(
        f"a {type(buffer).__name__} cannot be changed in place: {why}. Use the result instead."
    )


def _as_array(buffer: Any) -> np.ndarray[Any, Any]:
    try:
        return np.asarray(buffer)
    except Exception as error:  # each framework raises its own
        raise UserError(
            f"a {type(buffer).__name__} cannot be sent: {error}. Give numbers in one rectangular "
            "array."
        ) from error


def _from_array(array: np.ndarray[Any, Any], writable: bool) -> torch.Tensor:
    dtype = array.dtype
    narrow = _NARROW.get(dtype.name) if dtype.kind == "V" or dtype.name in _NARROW else None
    if narrow is None and dtype.kind not in "biufc":
        raise UserError(f"{_what(dtype)} cannot be sent. Give numbers in one rectangular array.")
    why_not = _why_copied(array, writable)
    if why_not and writable:
        raise UserError(f"an array cannot be changed in place: {why_not}. Give it a copy.")
    if why_not:
        array = np.ascontiguousarray(array, dtype.newbyteorder("=")).reshape(array.shape)
    if narrow is not None:
        width = np.int16 if dtype.itemsize == 2 else np.uint8
        return _view(array.view(width)).view(narrow)
    try:
        return _view(array)
    except TypeError as error:
        raise UserError(f"{_what(dtype)} cannot be sent: {error}") from error


def _why_copied(array: np.ndarray[Any, Any], writable: bool) -> str:
    if not array.dtype.isnative:
        return "its bytes are in another order than this machine's"
    if any(stride < 0 for stride in array.strides):
        return "it runs backwards in memory"
    if any(stride % max(array.itemsize, 1) for stride in array.strides):
        return "its elements lie apart by parts of an element"
    if writable and not array.flags.writeable:
        return "it is read-only"
    return ""


def _view(array: np.ndarray[Any, Any]) -> torch.Tensor:
    """torch warns of memory that is read-only, since its tensors do not know of such. Here the
    caller has promised not to write, so torch is shown the same memory without the mark."""
    if array.flags.writeable:
        return torch.from_numpy(array)
    return torch.from_numpy(np.asarray(_Unmarked(array)))


class _Unmarked:
    """The memory of a read-only array, kept alive as long as anybody looks at it."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self._array = array
        interface = dict(array.__array_interface__)
        interface["data"] = (interface["data"][0], False)
        self.__array_interface__ = interface


def _what(dtype: np.dtype[Any]) -> str:
    """For an error: the dtype, and what a user calls it."""
    names = {"U": "text", "S": "text", "O": "Python objects, or rows of different lengths,"}
    names |= {"M": "dates", "m": "durations", "T": "text"}
    called = names.get(dtype.kind)
    return f"{called} (dtype {dtype})" if called else f"dtype {dtype}"
