"""Nested state (dicts, lists, numbers, tensors) as JSON plus tensors, and back. No pickle.

An optimizer's state dict is a tree with tensors at some leaves. The tree becomes JSON in which
each tensor is replaced by the name it has among the tensors; dictionaries with keys that are not
strings, and tuples, are marked so that they come back as they were.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from farandole.errors import CheckpointError

Json = Any


def pack(value: Any) -> tuple[Json, dict[str, torch.Tensor]]:
    """The tree of `value`, and its tensors by name.

    Raises `CheckpointError` naming the place of a value that cannot be stored.
    """
    tensors: dict[str, torch.Tensor] = {}
    return _pack(value, "", tensors), tensors


def unpack(tree: Json, tensors: Mapping[str, torch.Tensor]) -> Any:
    """What `pack` was given."""
    if isinstance(tree, list):
        return [unpack(item, tensors) for item in tree]
    if not isinstance(tree, dict):
        return tree
    if "$tensor" in tree:
        return tensors[tree["$tensor"]]
    if "$array" in tree:
        return tensors[tree["$array"]].numpy()
    if "$tuple" in tree:
        return tuple(unpack(item, tensors) for item in tree["$tuple"])
    if "$float" in tree:
        return float(tree["$float"])
    if "$items" in tree:
        return {key: unpack(item, tensors) for key, item in tree["$items"]}
    return {key: unpack(item, tensors) for key, item in tree.items()}


def _pack(value: Any, path: str, tensors: dict[str, torch.Tensor]) -> Json:
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, np.generic):
        return _pack(value.item(), path, tensors)
    if isinstance(value, float):
        # JSON has no infinities; everything finite survives Python's shortest decimal exactly.
        return value if np.isfinite(value) else {"$float": repr(value)}
    if isinstance(value, torch.Tensor) and _is_storable(value):
        return {"$tensor": _add(tensors, path, value)}
    if isinstance(value, np.ndarray) and value.dtype.isnative and value.dtype.kind in "biuf":
        return {"$array": _add(tensors, path, torch.from_numpy(value.copy(order="C")))}
    if isinstance(value, tuple):
        return {"$tuple": _items(value, path, tensors)}
    if isinstance(value, list):
        return _items(value, path, tensors)
    if isinstance(value, Mapping):
        if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return {key: _pack(v, _join(path, key), tensors) for key, v in value.items()}
        if all(isinstance(key, (str, int)) for key in value):
            return {"$items": [[k, _pack(v, _join(path, k), tensors)] for k, v in value.items()]}
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


def _items(values: Any, path: str, tensors: dict[str, torch.Tensor]) -> list[Json]:
    return [_pack(item, _join(path, index), tensors) for index, item in enumerate(values)]


def _join(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)
