"""Plain values as bytes, and back: the same values, types and bits, and nothing is run."""

from __future__ import annotations

import collections
import dataclasses
import datetime as dt
import enum
import math
import struct
import sys
import types
from argparse import Namespace
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch import nn

from farandole.errors import DamagedError, UserError
from farandole.serialization.objects import dump, load


class Colour(enum.Enum):
    RED = "red"
    BLUE = object()  # its value could not travel, its name can


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Mode(enum.Flag):
    READ = enum.auto()
    WRITE = enum.auto()


class Point(NamedTuple):
    x: float
    tag: str


@dataclasses.dataclass
class Config:
    lr: float
    tags: list[str] = dataclasses.field(default_factory=list)
    runs: int = dataclasses.field(default=0, init=False)

    def __post_init__(self) -> None:
        self.seen = "set in __post_init__"
        self.runs += 1

    class Inner(enum.Enum):
        ONE = 1


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    size: tuple[int, int]


def there_and_back(value: Any) -> Any:
    return load(bytes(dump(value)))


def same(left: Any, right: Any) -> bool:
    """Equal in type, value and bits."""
    if type(left) is not type(right):
        return False
    if isinstance(left, torch.Tensor):
        if left.layout is torch.sparse_coo:
            return left.is_coalesced() == right.is_coalesced() and all(
                map(same, (left._indices(), left._values()), (right._indices(), right._values()))
            )
        return (left.dtype, left.shape, left.requires_grad) == (
            right.dtype,
            right.shape,
            right.requires_grad,
        ) and raw(left) == raw(right)
    if isinstance(left, (np.ndarray, np.generic)):
        kind = (left.dtype.str, left.shape) == (right.dtype.str, right.shape)
        return kind and left.tobytes() == right.tobytes()
    if isinstance(left, dict):
        return all(map(same, list(left), list(right))) and all(
            map(same, list(left.values()), list(right.values()))
        )
    if isinstance(left, (list, tuple, collections.deque)):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, (Namespace, types.SimpleNamespace)):
        return same(vars(left), vars(right))
    if isinstance(left, (float, complex)):
        return repr(left) == repr(right)  # also NaN, and the sign of zero
    return bool(left == right)


def raw(tensor: torch.Tensor) -> bytes:
    row = tensor.detach().resolve_conj().contiguous().reshape(-1)
    return row.view(torch.uint8).numpy().tobytes()


def sparse(indices: list[list[int]], values: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.sparse_coo_tensor(indices, values, shape, check_invariants=True)


TENSOR_DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint64,
    torch.bool, torch.complex64, torch.complex128,
]  # fmt: skip
TENSORS = st.builds(
    lambda shape, dtype, seed: (
        torch.rand(shape, generator=torch.Generator().manual_seed(seed)) * 9
    ).to(dtype),
    st.lists(st.integers(0, 3), max_size=3),
    st.sampled_from(TENSOR_DTYPES),
    st.integers(0, 99),
)
ARRAYS = hnp.arrays(
    hnp.scalar_dtypes() | hnp.byte_string_dtypes(max_len=3) | hnp.unicode_string_dtypes(max_len=3),
    hnp.array_shapes(min_dims=0, max_dims=2, min_side=0, max_side=3),
)
ANY_TEXT = st.text(st.characters(), max_size=6) | st.text(st.sampled_from("\ud83d\ude00a"))
HASHABLE = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | ANY_TEXT
    | st.binary(max_size=5) | st.complex_numbers(allow_nan=False) | st.dates() | st.timedeltas()
    | st.sampled_from([*Colour, *Level, Mode.READ | Mode.WRITE, Mode(0), Path("a/b"), torch.int8])
)  # fmt: skip
KEYS = HASHABLE | st.tuples(HASHABLE, HASHABLE) | st.frozensets(HASHABLE, max_size=2)
LEAVES = (
    HASHABLE | TENSORS | ARRAYS | ARRAYS.filter(lambda a: a.size).map(lambda a: a.flat[0])
    | st.floats() | st.complex_numbers() | st.binary().map(bytearray) | st.datetimes() | st.times()
    | st.datetimes(timezones=st.just(dt.timezone(dt.timedelta(hours=2), "here")))
)  # fmt: skip
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=3)
        | st.dictionaries(KEYS, inner, max_size=3).map(collections.OrderedDict)
        | st.sets(KEYS, max_size=3)
        | st.lists(inner, max_size=3).map(lambda items: collections.deque(items, 5))
        | st.builds(Point, inner, inner)
        | st.dictionaries(st.text(max_size=3), inner, max_size=2).map(
            lambda content: types.SimpleNamespace(**content)
        )
    ),
    max_leaves=6,
)


@settings(max_examples=150)
@given(value=VALUES)
def test_there_and_back(value: Any) -> None:
    assert same(there_and_back(value), value)


@settings(max_examples=150)
@given(value=VALUES, data=st.data())
def test_damage_is_an_error_or_another_value_and_nothing_else(
    value: Any, data: st.DataObject
) -> None:
    whole = dump(value)
    place = data.draw(st.integers(0, len(whole) - 1))
    damaged = whole[:place] + bytes([whole[place] ^ data.draw(st.integers(1, 255))])
    for bad in (damaged + whole[place + 1 :], whole[:place]):
        try:
            load(bytes(bad))
        except (DamagedError, UserError):
            pass
        else:
            assert len(bad) == len(whole), "what is cut short is always noticed"


@pytest.mark.parametrize(
    "value",
    [
        10**5000,
        -(2**63),
        math.inf,
        -0.0,
        range(3, 30, 4),
        slice(None, 2),
        collections.Counter("abca"),
        collections.defaultdict(list, {"a": [1]}),
        collections.defaultdict(None, {"a": [1]}),
        torch.Size([2, 3]),
        torch.device("cuda:1"),
        torch.bfloat16,
        PurePosixPath("/a"),
        PureWindowsPath("C:\\a"),
        dt.UTC,
        Namespace(lr=0.1, **{"not a name": None}),
        Colour.BLUE,
        Config.Inner.ONE,
        Frozen((2, 3)),
        Config(0.1, ["a"]),
        np.float64("nan"),
        np.float32(0.1),
        np.bool_(True),
        np.str_("é"),
        np.datetime64("2024-02-29"),
        np.zeros((0, 2), dtype=">i2"),
        np.arange(12).reshape(3, 4)[:, ::-2],
        torch.zeros(2, 0),
        torch.arange(12.0).view(3, 4).t(),
        torch.ones(3, requires_grad=True),
        torch.tensor([1 + 2j]).conj(),
        nn.Parameter(torch.ones(2, dtype=torch.bfloat16)),
        nn.Parameter(torch.ones(2), requires_grad=False),
        sparse([[2, 0, 2]], torch.tensor([1.0, 2.0, 3.0]), (4,)),
        sparse([[0, 2]], torch.ones(2, 3), (4, 3)).coalesce(),
    ],
    ids=lambda value: type(value).__name__,
)
def test_one_of_each(value: Any) -> None:
    assert same(there_and_back({"x": [value]})["x"][0], value)


def test_attributes_come_along() -> None:
    config = Config(0.1)
    config.runs = 7
    back = there_and_back(config)
    assert (back.runs, back.seen) == (7, "set in __post_init__"), "it was not run again"
    factory = there_and_back(collections.defaultdict(int)).default_factory
    assert factory is int
    assert there_and_back(collections.deque([1], maxlen=3)).maxlen == 3
    moment = dt.datetime(2024, 10, 27, 2, 30, fold=1)
    assert there_and_back(moment).fold == 1


def test_state_dicts() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    optimizer = torch.optim.Adam(model.parameters(), betas=(0.8, 0.9))
    model(torch.randn(4, 2)).sum().backward()
    optimizer.step()
    back = there_and_back({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    assert back["model"]._metadata == model.state_dict()._metadata
    fresh = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    fresh.load_state_dict(back["model"])
    assert all(same(a, b) for a, b in zip(fresh.parameters(), model.parameters(), strict=True))
    assert same(back["optimizer"], optimizer.state_dict())


def test_what_arrives_can_be_changed() -> None:
    tensor, array = there_and_back([torch.zeros(2), np.zeros(2)])
    tensor += 1
    array += 1
    assert tensor.sum() == array.sum() == 2


class Local:
    pass


def local_dataclass() -> Any:
    @dataclasses.dataclass
    class Hidden:
        x: int = 1

    return Hidden()


def itself() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


@dataclasses.dataclass
class AlsoDict(dict):  # type: ignore[type-arg]
    x: int = 1


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"a": [1, Local()]}, r"^a\.1 is a .*\.Local, .* make its class a dataclass"),
        (Local, r"^the value is a type, .* send its name"),
        ([len], r"0 is a builtin_function_or_method, .* Code is not sent"),
        (nn.Linear(1, 1), r"Linear, .* Send its state_dict\(\)"),
        ({"it": iter([1])}, r"^it is a list_iterator, .* Send list\(…\) of it"),
        (types.MappingProxyType({}), r"Send dict\(…\) of it"),
        ({(Local(),): 1}, r"\(the key\)\.0 is a .*Local"),
        ({"s": {1, Local}}, r"^s\.\d is a type"),
        (local_dataclass(), "Define its class at the top of a module"),
        (AlsoDict(), r"AlsoDict, which cannot be saved or sent"),
        (collections.defaultdict(lambda: 1), r"Its factory is none of bool, bytes"),
        (np.array([None]), r"numpy.ndarray, .* Send array.tolist\(\)"),
        (torch.zeros(2, device="meta"), "It has no numbers"),
        (itself(), "nested more than 100 deep, .* Does it contain itself"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_travel_is_named_by_its_place(value: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        dump(value)


@pytest.mark.filterwarnings("ignore:Sparse")
def test_a_tensor_of_another_layout_is_refused() -> None:
    with pytest.raises(UserError, match=r"sparse_csc\), .* Send tensor.to_dense\(\)"):
        dump(torch.eye(2).to_sparse_csc())


def test_a_hundred_levels_can_travel() -> None:
    value: Any = {}
    for _ in range(100):
        value = {1: value}
    assert there_and_back(value) == value


def renamed(value: Any, old: str, new: str) -> bytes:
    """The bytes of `value` with another word of the same length in the head."""
    assert len(old) == len(new)
    data = bytes(dump(value))
    assert old.encode() in data
    return data.replace(old.encode(), new.encode())


def test_classes_are_looked_up_and_never_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("guest_module")
    module.__dict__["Guest"] = dataclasses.make_dataclass("Guest", ["x"])
    module.Guest.__module__ = "guest_module"
    monkeypatch.setitem(sys.modules, "guest_module", module)
    data = dump(module.Guest(3))
    assert load(data).x == 3
    monkeypatch.delitem(sys.modules, "guest_module")
    with pytest.raises(UserError, match=r"class Guest .*Write `import guest_module` on every rank"):
        load(data)


@pytest.mark.parametrize(
    ("value", "old", "new"),
    [
        (Level.LOW, "Level", "Local"),  # a class, but no enum
        (Frozen((1, 2)), "Frozen", "Colour"),
        (Point(1.0, "a"), "Point", "Level"),
        (Level.LOW, "Level", "sys\\\\"),
    ],
)
def test_a_name_of_another_kind_of_class_is_refused(value: Any, old: str, new: str) -> None:
    with pytest.raises((UserError, DamagedError)):
        load(renamed(value, old, new))


def test_looking_a_class_up_asks_no_module_for_attributes(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    module = types.ModuleType("lazy_module")
    module.__dict__["__getattr__"] = asked.append
    monkeypatch.setitem(sys.modules, "lazy_module", module)
    monkeypatch.setitem(sys.modules, "real_module", types.ModuleType("real_module"))
    sys.modules["real_module"].__dict__["Level"] = Level
    monkeypatch.setattr(Level, "__module__", "real_module")
    data = renamed(Level.LOW, "real_module", "lazy_module")
    with pytest.raises(UserError, match="lazy_module"):
        load(data)
    assert asked == []


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "0 bytes arrived damaged"),
        (b"FdOb\xff\xff\xff\xff\xff\xff\xff\x7f", "begins with"),
        (b"pickle me" + bytes(9), "begins with"),
        (renamed(np.zeros(4, "<i8"), "<i8", "|O8"), "no dtype of numbers"),
        (renamed(torch.zeros(4), "[4]", "[5]"), "16 bytes are not"),
        (renamed(torch.zeros(0, 10), "[0,10]", "[0,-1]"), "0 bytes are not"),
        (bytes(dump([1])) + b"more", "tensors of 0 bytes, but 4 came"),
        (bytes(dump(b"ab"))[:-2] + b"a", "1 bytes are not .2,. of 1 bytes"),
    ],
)
def test_damage(data: bytes, message: str) -> None:
    with pytest.raises(DamagedError, match=message):
        load(data)


def test_a_truth_value_is_0_or_1() -> None:
    data = dump(torch.tensor([True]))
    data[-1] = 2
    with pytest.raises(DamagedError, match="neither 0 nor 1"):
        load(data)


def test_a_head_of_the_wrong_shape() -> None:
    for head in (b"{}", b"[]", b'[[],[["torch.uint8",[-1]]]]', b'[{"$tensor":"0"},[]]',
                 b'[{"$kind":["bytes",null,-1]},[]]', b'[{"$kind":["none",null,1]},[]]',
                 b'[{"$kind":["bytearray",null,1000000000000]},[]]', b"[" * 100_000):  # fmt: skip
        with pytest.raises(DamagedError, match="damaged"):
            load(struct.pack("<4sQ", b"FdOb", len(head)) + head)
