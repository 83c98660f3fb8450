"""Any plain Python value as bytes, and back. Nothing that arrives is run: no pickle.

    header   magic, length of the head
    head     JSON: the tree of the value, and the length of each blob
    blobs    the bytes of tensors, arrays and byte strings, one after the other

In the tree, None, truth values, numbers and strings stand for themselves. Everything else is a list
of three: its kind, what is to be known of it, and what is in it (`object_kinds`).

A value that cannot be sent travels as a refusal instead, so that the ranks that wait for it learn
why, and raise too.
"""

from __future__ import annotations

import itertools
import json
import math
import reprlib
import struct
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from farandole.errors import UserError
from farandole.horovod.common.exceptions import HorovodInternalError
from farandole.horovod.engine.object_kinds import CannotTravel, kind_of, named

Json = Any

_HEADER = struct.Struct("<4sQ")
_VALUE, _REFUSAL = b"FdOb", b"FdNo"
_MAX_DEPTH = 100
_MAX_JSON_INT = 2**63  # Python reads and writes no decimals of more than some thousand digits


def dump(value: Any) -> bytearray:
    """`value` as bytes. Raises `UserError` that names the place of what cannot be sent."""
    writer = _Writer()
    tree = writer.write(value, "", 0)
    head = json.dumps([tree, [len(blob) for blob in writer.blobs]], separators=(",", ":")).encode()
    return bytearray().join([_HEADER.pack(_VALUE, len(head)), head, *writer.blobs])


def dump_refusal(why: str) -> bytearray:
    """Bytes that make `load` raise `UserError`, for those who wait for a value that cannot come."""
    text = why.encode()
    return bytearray().join([_HEADER.pack(_REFUSAL, len(text)), text])


def load(data: bytes | bytearray | memoryview) -> Any:
    """What `dump` was given; tensors come back on the CPU.

    Raises `UserError` for a refusal, and for a class that this process has not imported;
    `HorovodInternalError` when the bytes are damaged.
    """
    view = memoryview(data)
    try:
        magic, length = _HEADER.unpack_from(view)
        end = _HEADER.size + length
        if magic not in (_VALUE, _REFUSAL) or end > len(view):
            raise ValueError(f"it begins with {bytes(view[:12])!r}")
        head = bytes(view[_HEADER.size : end]).decode()
        if magic == _REFUSAL:
            raise UserError(head)
        tree, lengths = json.loads(head)
        return _Reader(view[end:], lengths).read(tree)
    except UserError:
        raise
    except Exception as error:  # whatever torch, numpy or a constructor makes of wrong parts
        raise HorovodInternalError(
            f"an object of {len(view)} bytes arrived damaged: {type(error).__name__}: {error}. "
            "Do all ranks run the same version of Farandole?"
        ) from error


class _Writer:
    def __init__(self) -> None:
        self.blobs: list[bytes] = []

    def write(self, value: Any, path: str, depth: int) -> Json:
        if depth > _MAX_DEPTH:
            raise UserError(
                f"object{path[:80]}… is nested more than {_MAX_DEPTH} deep. Does it contain itself?"
            )
        cls = type(value)
        if value is None or cls is bool:
            return value
        if cls is int:
            return value if abs(value) < _MAX_JSON_INT else ["int", None, hex(value)]
        if cls is float:
            return value if math.isfinite(value) else ["float", None, repr(value)]
        if cls is str:
            return value if value.isascii() else self._text(value)
        if cls is bytes:
            self.blobs.append(value)
            return ["bytes", None, len(self.blobs) - 1]
        if cls is list or cls is tuple:
            inside = [self.write(v, f"{path}[{i}]", depth + 1) for i, v in enumerate(value)]
            return [cls.__name__, None, inside]
        if cls is dict:
            return ["dict", None, [self._item(k, v, path, depth + 1) for k, v in value.items()]]
        return self._kind(value, path, depth)

    def _text(self, value: str) -> Json:
        try:
            value.encode()
            return value
        except UnicodeEncodeError:  # halves of characters; two of them JSON would make into one
            return ["str", None, list(map(ord, value))]

    def _item(self, key: Any, value: Any, path: str, depth: int) -> Json:
        place = f"{path}[{reprlib.repr(key)}]"
        return [self.write(key, f"{place} (the key)", depth), self.write(value, place, depth)]

    def _kind(self, value: Any, path: str, depth: int) -> Json:
        known = kind_of(value)
        try:
            if known is None:
                raise CannotTravel(_instead_of(value))
            name, kind = known
            detail, inside = kind.apart(value)
        except CannotTravel as reason:
            what = _name_of(value)
            raise UserError(
                f"object{path} is a {what}, which cannot travel between ranks. {reason}"
            ) from None
        return [name, self.write(detail, path, depth + 1), self.write(inside, path, depth + 1)]


class _Reader:
    def __init__(self, data: memoryview, lengths: list[int]) -> None:
        if min(lengths, default=0) < 0 or sum(lengths) != len(data):
            raise ValueError(f"blobs of {sum(lengths)} bytes, but {len(data)} came")
        ends = itertools.accumulate(lengths)
        self._blobs = [data[end - length : end] for end, length in zip(ends, lengths, strict=True)]

    def read(self, tree: Json) -> Any:
        if not isinstance(tree, list):
            if isinstance(tree, dict):
                raise ValueError("there is a JSON object in the tree")
            return tree
        name, detail, inside = tree
        if name == "list":
            return [self.read(item) for item in inside]
        if name == "tuple":
            return tuple(self.read(item) for item in inside)
        if name == "dict":
            return {self.read(key): self.read(value) for key, value in inside}
        if name == "bytes":
            if inside < 0:
                raise IndexError(f"there is no blob {inside}")
            return bytes(self._blobs[inside])
        if name == "int":
            return int(inside, 16)
        if name == "float":
            return float(inside)
        if name == "str":
            return "".join(map(chr, inside))
        return named(name).together(self.read(detail), self.read(inside))


def _name_of(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{type(value).__name__} of {value.dtype} ({value.layout})"
    cls = type(value)
    return cls.__name__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"


def _instead_of(value: Any) -> str:
    """What to send in place of a value of no kind."""
    if isinstance(value, (nn.Module, torch.optim.Optimizer)):
        return "Send its state_dict()."
    if isinstance(value, type) or callable(value):
        return "Code is not sent; send its name, and look it up there."
    if isinstance(value, Mapping):
        return "Send dict(…) of it."
    if hasattr(value, "__iter__"):
        return "Send list(…) of it."
    return (
        "Send numbers, strings, tensors, and lists and dicts of these, or make its class a "
        "dataclass."
    )
