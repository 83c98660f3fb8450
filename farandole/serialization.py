"""Nested state (dicts, lists, numbers, tensors) as JSON plus tensors, and back. No pickle.

An optimizer's state dict is a tree with tensors at some leaves. The tree becomes JSON in which
each tensor is replaced by the name it has among the tensors; dictionaries with keys that are not
strings, and tuples, are marked so that they come back as they were.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import torch

from farandole.errors import CheckpointError

Json = Any

_MARKS: Final = MappingProxyType(
    dict[str, type[Any]](
        {"$tensor": str, "$array": str, "$float": str, "$tuple": list, "$items": list}
    )
)
"""What stands for something that JSON does not have, and what it is written with."""
_DEEPEST: Final = 200
"""Levels of a tree; Python itself would give up at some thousand."""


def pack(value: Any) -> tuple[Json, dict[str, torch.Tensor]]:
    """The tree of `value`, and its tensors by name.

    Raises `CheckpointError` naming the place of a value that cannot be stored.
    """
    tensors: dict[str, torch.Tensor] = {}
    return _pack(value, "", tensors, _DEEPEST), tensors


def unpack(tree: Json, tensors: Mapping[str, torch.Tensor]) -> Any:
    """What `pack` was given. Raises `ValueError` or another error for a tree that is none."""
    return _unpack(tree, tensors, _DEEPEST)


def _unpack(tree: Json, tensors: Mapping[str, torch.Tensor], depth: int) -> Any:
    if depth == 0:
        raise ValueError(f"it is nested more than {_DEEPEST} deep")
    if isinstance(tree, list):
        return [_unpack(item, tensors, depth - 1) for item in tree]
    if not isinstance(tree, dict):
        return tree
    marks = [key for key in tree if key.startswith("$")]
    if not marks:
        return {key: _unpack(item, tensors, depth - 1) for key, item in tree.items()}
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
        return tuple(_unpack(item, tensors, depth - 1) for item in value)
    return {key: _unpack(item, tensors, depth - 1) for key, item in value}


def _pack(value: Any, path: str, tensors: dict[str, torch.Tensor], depth: int) -> Json:
    if depth == 0:
        raise CheckpointError(
            f"{path[:80]}… is nested more than {_DEEPEST} deep, or holds itself. A checkpoint "
            "cannot hold that."
        )
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, np.generic):
        return _pack(value.item(), path, tensors, depth)
    if isinstance(value, float):
        # JSON has no infinities; everything finite survives Python's shortest decimal exactly.
        return value if np.isfinite(value) else {"$float": repr(value)}
    if isinstance(value, torch.Tensor) and _is_storable(value):
        return {"$tensor": _add(tensors, path, value)}
    if isinstance(value, np.ndarray) and value.dtype.isnative and value.dtype.kind in "biuf":
        return {"$array": _add(tensors, path, torch.from_numpy(value.copy(order="C")))}

    def inside(key: object, item: Any) -> Json:
        return _pack(item, f"{path}.{key}" if path else str(key), tensors, depth - 1)

    if isinstance(value, tuple):
        return {"$tuple": [inside(index, item) for index, item in enumerate(value)]}
    if isinstance(value, list):
        return [inside(index, item) for index, item in enumerate(value)]
    if isinstance(value, Mapping):
        if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return {key: inside(key, item) for key, item in value.items()}
        if all(isinstance(key, (str, int)) for key in value):
            return {"$items": [[key, inside(key, item)] for key, item in value.items()]}
    raise CheckpointError(
        f"{path or 'the state'} is a {_kind(value)}, which a checkpoint cannot hold. "
        "Save numbers, strings, tensors, and lists and dicts of these."
    )


def _add(tensors: dict[str, torch.Tensor], path: str, tensor: torch.Tensor) -> str:
    """Adds `tensor` under its place in the tree; returns the name it got."""
    name = path or "value"
    while name in tensors:  # {"a.b": …} and {"a": {"b": …}} name the same place
        name += "'"
    tensors[name] = tensor
    return name


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
