"""Memory of others goes through a group: shared where it can be, copied or refused where not."""

from __future__ import annotations

import gc
import warnings
from typing import Any

import numpy as np
import pytest
import torch

from farandole.comm import Group
from farandole.comm.buffers import from_buffer, to_array
from farandole.errors import UserError


class ByInterface:
    """Somebody's array, of which only the interface is known."""

    def __init__(self, array: Any) -> None:
        self.__array_interface__ = array.__array_interface__
        self._kept = array


class ByDlpack:
    """Somebody's array, which is lent through DLPack alone."""

    def __init__(self, array: Any) -> None:
        self._array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self._array.__dlpack_device__()


WAYS = {"array": np.asarray, "interface": ByInterface, "dlpack": ByDlpack, "memory": memoryview}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", ["float64", "float16", "int8", "int64", "complex64", "bool"])
def test_memory_is_shared_both_ways(way: str, dtype: str) -> None:
    array = np.arange(6).reshape(2, 3).astype(dtype)
    tensor = from_buffer(WAYS[way](array))
    assert tensor.shape == (2, 3)
    assert str(tensor.dtype) == f"torch.{dtype}"
    array[1, 2] = 0
    assert not tensor[1, 2], "it is the same memory"
    back = to_array(tensor)
    assert back.dtype == array.dtype
    assert np.shares_memory(back, array)


@pytest.mark.parametrize("way", WAYS)
def test_a_group_changes_arrays_in_place(on_ranks: Any, way: str) -> None:
    def body(group: Group) -> list[float]:
        mine = np.array([1.0, 2.0 * group.rank])
        group.all_reduce(from_buffer(WAYS[way](mine), writable=True))
        return mine.tolist()

    assert on_ranks(3, body) == [[3.0, 6.0]] * 3


def test_read_only_memory_is_shared_without_a_warning_and_kept_alive() -> None:
    array = np.arange(4.0)
    array.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tensor = from_buffer(array)
    assert np.shares_memory(to_array(tensor), array)
    del array
    gc.collect()
    assert tensor.tolist() == [0.0, 1.0, 2.0, 3.0]
    read_only = np.frombuffer(b"\x01\x02", np.uint8)
    for given in (read_only, ByInterface(read_only), memoryview(b"\x01\x02")):
        with pytest.raises(UserError, match="read-only"):
            from_buffer(given, writable=True)


@pytest.mark.parametrize(
    ("array", "why"),
    [
        (np.arange(4.0)[::-1], "backwards"),
        (np.arange(4, dtype=">i4"), "another order"),
        (np.zeros(3, [("a", "i1"), ("b", "i4")])["b"], "parts of an element"),
    ],
)
def test_what_torch_has_no_view_of_is_copied_or_refused(array: Any, why: str) -> None:
    assert from_buffer(array).tolist() == array.tolist()
    with pytest.raises(UserError, match=why):
        from_buffer(array, writable=True)


def test_strides_and_missing_dimensions_stay() -> None:
    array = np.arange(12.0).reshape(3, 4)[:, ::2].T
    assert from_buffer(array).tolist() == array.tolist()
    assert np.shares_memory(to_array(from_buffer(array)), array)
    assert from_buffer(np.float32(2.5)).shape == ()
    assert from_buffer(3.5).item() == 3.5
    assert from_buffer(np.zeros((0, 3))).shape == (0, 3)
    tensor = torch.ones(2)
    assert from_buffer(tensor) is tensor


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (np.array(["a", "b"]), "text"),
        (np.array([b"a"]), "text"),
        ([[1.0], [2.0, 3.0]], "rectangular"),
        (np.array([None]), "Python objects"),
        (np.array(["2020-01-01"], "M8[D]"), "dates"),
        (np.zeros(2, "longdouble"), "longdouble|float128"),
        (None, "Python objects"),
    ],
)
def test_what_is_no_number_is_refused_by_name(value: Any, why: str) -> None:
    with pytest.raises(UserError, match=why):
        from_buffer(value)


def test_a_list_is_nobodys_memory() -> None:
    assert from_buffer([1.0, 2.0]).tolist() == [1.0, 2.0]
    with pytest.raises(UserError, match="a list cannot be changed in place"):
        from_buffer([1.0, 2.0], writable=True)


def test_lazy_views_come_out_as_numbers() -> None:
    z = torch.tensor([1 + 2j])
    assert to_array(z.conj()).tolist() == [1 - 2j]
    assert to_array(z.conj().imag).tolist() == [-2.0]
    assert to_array(torch.ones(2, requires_grad=True)).tolist() == [1.0, 1.0]
