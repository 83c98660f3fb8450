"""A tree (dicts, lists, numbers, tensors) as JSON plus tensors, and back.

In the JSON, each tensor is replaced by the name that it has among the tensors. What JSON does not
have is an object with one key that begins with `$`, so that it comes back as it was:

    $tensor  the name of a tensor             $tuple  the items
    $array   the name of a NumPy array        $items  a dict with other keys: [key, value] pairs
    $float   inf, -inf or nan, as text        $kind   [name, detail, content] of an extended kind

Without extended kinds, subclasses are saved as the plain values that they are: a NumPy number as a
number. With them (`Kinds`), a value comes back with the same type, or it is refused.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
import torch

from farandole.errors import NotSerializableError

Json = Any

_MARKS: Final = MappingProxyType(
    dict[str, type[Any]](
        {
            "$tensor": str,
            "$array": str,
            "$float": str,
            "$tuple": list,
            "$items": list,
            "$kind": list,
        }
    )
)
"""Each mark, and the type of the JSON that follows it."""
_DEEPEST: Final = 200
"""Levels of a tree. Python's own recursion limit is about five times as far away."""
_DEEPEST_WITH_KINDS: Final = 100
_MAX_JSON_INT: Final = 2**63  # Python refuses decimals of more than some thousand digits


class Parts(NamedTuple):
    """A value of an extended kind, taken apart: simpler values that are packed in turn."""

    kind: str
    detail: Any
    content: Any


class Kinds(Protocol):
    """Further kinds of values, and which tensors are leaves."""

    def is_leaf(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor is stored as it is. Others are taken apart."""
        ...

    def take_apart(self, value: Any, place: str) -> Parts:
        """Raises `NotSerializableError` for a value of no known kind."""
        ...

    def put_together(self, parts: Parts) -> Any:
        """The value. Raises any error if the parts do not fit."""
        ...


def pack(value: Any, kinds: Kinds | None = None) -> tuple[Json, dict[str, torch.Tensor]]:
    """The tree of `value`, and its tensors by name.

    Raises `NotSerializableError`, which names the place of a value that cannot be stored.
    """
    packer = _Packer() if kinds is None else _KindsPacker(kinds)
    return packer.pack(value, "", packer.deepest), packer.tensors


def unpack(tree: Json, tensors: Mapping[str, torch.Tensor], kinds: Kinds | None = None) -> Any:
    """What `pack` was given. Raises `ValueError` or another error for a tree that is none."""
    deepest = _DEEPEST if kinds is None else _DEEPEST_WITH_KINDS
    return _unpack(tree, tensors, kinds, deepest)


def _unpack(
    tree: Json, tensors: Mapping[str, torch.Tensor], kinds: Kinds | None, depth: int
) -> Any:
    # The limit is the one of `pack`: a tree from elsewhere must not exhaust the stack.
    if depth < 0:
        raise ValueError(
            f"it is nested more than {_DEEPEST if kinds is None else _DEEPEST_WITH_KINDS} deep"
        )

    def inside(item: Json) -> Any:
        return _unpack(item, tensors, kinds, depth - 1)

    if isinstance(tree, list):
        return [inside(item) for item in tree]
    if not isinstance(tree, dict):
        return tree
    marks = [key for key in tree if key.startswith("$")]
    if not marks:
        return {key: inside(item) for key, item in tree.items()}
    if len(tree) != 1 or marks[0] not in _MARKS:
        raise ValueError(f"{marks[0][:20]!r} means nothing there")
    ((mark, value),) = tree.items()
    if not isinstance(value, _MARKS[mark]):
        raise ValueError(f"{mark!r} has no {type(value).__name__}")
    if mark == "$tensor":
        return tensors[value]
    if mark == "$array":
        return tensors[value].numpy()
    if mark == "$float":
        return float(value)
    if mark == "$tuple":
        return tuple(inside(item) for item in value)
    if mark == "$items":
        return {inside(key): inside(item) for key, item in value}
    if kinds is None:
        raise ValueError("extended kinds are not expected there")
    kind, detail, content = value
    return kinds.put_together(Parts(kind, inside(detail), inside(content)))


class _Packer:
    """Plain values. The name of a tensor is its place, so that a file of tensors can be read."""

    deepest = _DEEPEST

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}

    def pack(self, value: Any, place: str, depth: int) -> Json:
        self.check_depth(place, depth)
        if isinstance(value, np.generic):
            value = value.item()
        if value is None or isinstance(value, (bool, int, str)):
            return value
        if isinstance(value, float):
            return _pack_float(value)
        if isinstance(value, torch.Tensor) and _is_storable(value):
            return {"$tensor": self._add(place, value)}
        if isinstance(value, np.ndarray) and value.dtype.isnative and value.dtype.kind in "biuf":
            return {"$array": self._add(place, torch.from_numpy(value.copy(order="C")))}
        if isinstance(value, tuple):
            return {"$tuple": self.pack_items(value, place, depth)}
        if isinstance(value, list):
            return self.pack_items(value, place, depth)
        if isinstance(value, Mapping):
            if all(isinstance(key, str) and not key.startswith("$") for key in value):
                return self.pack_dict(value, place, depth)
            if all(isinstance(key, (str, int)) for key in value):
                return {"$items": [[k, v] for k, v in self.pack_dict(value, place, depth).items()]}
        raise NotSerializableError(
            place,
            _kind(value),
            "Numbers, strings and tensors can be, and lists, tuples and dicts of these.",
        )

    def check_depth(self, place: str, depth: int) -> None:
        if depth < 0:
            raise NotSerializableError(
                f"{place[:80]}…",
                f"value nested more than {self.deepest} deep",
                "Does it contain itself?",
            )

    def pack_items(self, items: tuple[Any, ...] | list[Any], place: str, depth: int) -> list[Json]:
        return [self.pack(item, _below(place, i), depth - 1) for i, item in enumerate(items)]

    def pack_dict(self, items: Mapping[Any, Any], place: str, depth: int) -> dict[Any, Json]:
        return {key: self.pack(item, _below(place, key), depth - 1) for key, item in items.items()}

    def _add(self, place: str, tensor: torch.Tensor) -> str:
        name = place or "value"
        while name in self.tensors:  # {"a.b": …} and {"a": {"b": …}} name the same place
            name += "'"
        self.tensors[name] = tensor
        return name


class _KindsPacker(_Packer):
    """Values of exactly these types, and of extended kinds. Tensors are numbered."""

    deepest = _DEEPEST_WITH_KINDS

    def __init__(self, kinds: Kinds) -> None:
        super().__init__()
        self._kinds = kinds

    def pack(self, value: Any, place: str, depth: int) -> Json:
        self.check_depth(place, depth)
        cls = type(value)
        if value is None or cls is bool:
            return value
        if cls is float:
            return _pack_float(value)
        if (cls is int and abs(value) < _MAX_JSON_INT) or (cls is str and _is_text(value)):
            return value
        if cls is torch.Tensor and self._kinds.is_leaf(value):
            name = str(len(self.tensors))
            self.tensors[name] = value
            return {"$tensor": name}
        if cls is tuple:
            return {"$tuple": self.pack_items(value, place, depth)}
        if cls is list:
            return self.pack_items(value, place, depth)
        if cls is dict:
            if all(type(key) is str and key[:1] != "$" and _is_text(key) for key in value):
                return self.pack_dict(value, place, depth)
            return {"$items": [self._pack_pair(k, v, place, depth) for k, v in value.items()]}
        parts = self._kinds.take_apart(value, place)
        detail = self.pack(parts.detail, place, depth - 1)
        return {"$kind": [parts.kind, detail, self.pack(parts.content, place, depth - 1)]}

    def _pack_pair(self, key: Any, item: Any, place: str, depth: int) -> Json:
        name = reprlib.repr(key)
        packed_key = self.pack(key, _below(place, f"{name} (the key)"), depth - 1)
        return [packed_key, self.pack(item, _below(place, name), depth - 1)]


def _below(place: str, key: object) -> str:
    return f"{place}.{key}" if place else str(key)


def _pack_float(value: float) -> Json:
    # JSON has no infinities. Everything finite survives Python's shortest decimal exactly.
    return value if np.isfinite(value) else {"$float": repr(float(value))}


def _is_text(value: str) -> bool:
    """Half characters are not: JSON would make one character out of two of them."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_storable(tensor: torch.Tensor) -> bool:
    """Safetensors holds dense tensors with data, of all plain types up to single complex."""
    plain = tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_meta
    return plain and (not tensor.is_complex() or tensor.dtype is torch.complex64)


def _kind(value: Any) -> str:
    """What `value` is, for a message: `set`, `<U1 array`, `complex128 tensor`."""
    if isinstance(value, np.ndarray):
        return f"{value.dtype} array"
    if isinstance(value, torch.Tensor):
        layout = "" if value.layout is torch.strided else f"{value.layout} ".removeprefix("torch.")
        return f"{layout}{value.dtype} tensor".replace("torch.", "")
    return type(value).__name__
