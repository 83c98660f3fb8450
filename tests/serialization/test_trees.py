"""State as JSON and tensors, and back: the same values, the same types, the same bits."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from farandole.errors import CheckpointError
from farandole.serialization import pack, unpack


def there_and_back(value: Any) -> Any:
    tree, tensors = pack(value)
    return unpack(json.loads(json.dumps(tree, allow_nan=False)), tensors)


def same(left: Any, right: Any) -> bool:
    """Equal in type, value and bits."""
    if isinstance(left, torch.Tensor):
        kind = (left.dtype, left.shape) == (right.dtype, right.shape)
        return (
            kind and left.reshape(-1).tolist().__repr__() == right.reshape(-1).tolist().__repr__()
        )
    if isinstance(left, np.ndarray):
        kind = (left.dtype, left.shape) == (right.dtype, right.shape)
        return kind and left.tobytes() == right.tobytes()
    if type(left) is not type(right):
        return False
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[k], right[k]) for k in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right) or repr(left) == repr(right) == "nan"


TENSORS = st.builds(
    lambda shape, dtype, seed: (
        torch.rand(shape, generator=torch.Generator().manual_seed(seed)) * 9
    ).to(dtype),
    st.lists(st.integers(0, 3), max_size=3),
    st.sampled_from(
        [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.bool]
    ),
    st.integers(0, 99),
)
ARRAYS = hnp.arrays(
    st.sampled_from([np.float32, np.int64, np.uint32, np.bool_]),
    hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3),
)
KEYS = st.text(max_size=5) | st.integers() | st.sampled_from(["$tensor", "$items", "a.b", "a", "0"])
STATES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | TENSORS | ARRAYS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(KEYS, inner, max_size=3)
    ),
    max_leaves=8,
)


@given(state=STATES)
def test_there_and_back(state: Any) -> None:
    assert same(there_and_back(state), state)


def test_places_with_the_same_name_do_not_meet() -> None:
    state = {
        "a.b": torch.tensor(1.0),
        "a": {"b": torch.tensor(2.0), "b'": torch.tensor(3.0)},
        "a.b'": torch.tensor(4.0),
    }
    assert same(there_and_back(state), state)
    mixed = {1: torch.tensor(1.0), "1": torch.tensor(2.0)}
    assert same(there_and_back(mixed), mixed)
    root = torch.tensor(5.0)
    assert same(there_and_back(root), root)


@pytest.mark.parametrize("number", [math.inf, -math.inf, 5e-324, 0.1, -0.0, 1e308])
def test_floats_survive_exactly(number: float) -> None:
    assert same(there_and_back({"x": [number]}), {"x": [number]})


@pytest.mark.parametrize(
    ("scalar", "number"),
    [(np.float32(0.1), float(np.float32(0.1))), (np.int64(3), 3), (np.bool_(True), True),
     (np.float64("inf"), math.inf), (np.str_("x"), "x")],
)  # fmt: skip
def test_numpy_s_numbers_become_plain_ones(scalar: Any, number: Any) -> None:
    assert same(there_and_back({"best": scalar}), {"best": number})


@pytest.mark.parametrize(
    "array",
    [
        np.arange(12).reshape(3, 4)[:, ::-2],
        np.array(3.5),
        np.frombuffer(b"readonly", dtype=np.uint8),
        np.zeros((0, 2), dtype=np.float16),
    ],
)
def test_arrays_of_every_make(array: np.ndarray[Any, Any]) -> None:
    assert same(there_and_back(array), array)


def test_random_states_survive() -> None:
    for state in (random.getstate(), np.random.get_state()):
        assert same(there_and_back(state), state)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"best": {"seen": {1, 2}}}, r"best\.seen is a set, which cannot be saved or sent"),
        ({"log": [1, Path("x")]}, r"log\.1 is a PosixPath"),
        (object(), "the value is a object"),
        ({"when": {(1, 2): 3}}, "when is a dict"),
        ({"z": 1j}, "z is a complex"),
        ({"names": np.array(["a"])}, "names is a <U1 array"),
        ({"things": np.array([None])}, "things is a object array"),
        ({"foreign": np.zeros(2, dtype=">f4")}, "foreign is a >f4 array"),
        ({"t": torch.zeros(2, dtype=torch.complex128)}, "t is a complex128 tensor"),
        ({"t": torch.zeros(2, 2).to_sparse()}, "t is a sparse_coo float32 tensor"),
        ({"t": torch.zeros(2, device="meta")}, "t is a float32 tensor"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_held_is_named_by_its_place(state: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        pack(state)
