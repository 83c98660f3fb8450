"""Any plain value as bytes, and back.

header    magic, length of the head
head      JSON: the tree of the value (`trees`), and [dtype, shape] of each of its tensors
tensors   their bytes, one after the other
"""

from __future__ import annotations

import json
import math
import struct
from typing import Any

import torch

from farandole.errors import DamagedError, UserError
from farandole.serialization.kinds import ExtendedKinds
from farandole.serialization.tensor_kinds import DTYPES, bytes_tensor, check_bytes
from farandole.serialization.trees import Json, pack, unpack

_HEADER = struct.Struct("<4sQ")
_MAGIC = b"FdOb"
_KINDS = ExtendedKinds()


def dump(value: Any) -> bytearray:
    """`value` as bytes. Raises `NotSerializableError`, which names the place of what cannot be
    sent."""
    tree, tensors = pack(value, _KINDS)
    described = [[str(tensor.dtype), list(tensor.shape)] for tensor in tensors.values()]
    head = json.dumps([tree, described], separators=(",", ":")).encode()
    return bytearray().join([_HEADER.pack(_MAGIC, len(head)), head, *map(_bytes, tensors.values())])


def load(data: bytes | bytearray | memoryview) -> Any:
    """What `dump` was given. Tensors come back on the CPU.

    Raises `DamagedError` when the bytes are damaged, and `UserError` for a class that this process
    has not imported.
    """
    view = memoryview(data)
    try:
        magic, length = _HEADER.unpack_from(view)
        end = _HEADER.size + length
        if magic != _MAGIC or end > len(view):
            raise ValueError(f"it begins with {bytes(view[:12])!r}")
        tree, described = json.loads(bytes(view[_HEADER.size : end]))
        return unpack(tree, _read_tensors(view[end:], described), _KINDS)
    except UserError:
        raise
    except Exception as error:  # whatever torch, NumPy or a constructor makes of wrong parts
        raise DamagedError(
            f"an object of {len(view)} bytes arrived damaged: {type(error).__name__}: {error}. "
            "Do all ranks run the same version of Farandole?"
        ) from error


def _bytes(tensor: torch.Tensor) -> memoryview:
    row = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return row.view(torch.uint8).numpy().data


def _read_tensors(data: memoryview, described: list[Json]) -> dict[str, torch.Tensor]:
    """Copies, so that the numbers are aligned and can be written to."""
    tensors: dict[str, torch.Tensor] = {}
    start = 0
    for number, (name, shape) in enumerate(described):
        dtype = DTYPES[name]
        end = start + math.prod(shape) * dtype.itemsize
        row = bytearray(data[start:end])
        check_bytes(len(row), shape, dtype.itemsize)
        flat = bytes_tensor(row)
        if dtype is torch.bool and (flat > 1).any():
            raise ValueError("a truth value is neither 0 nor 1")
        tensors[str(number)] = flat.view(dtype).reshape(shape)
        start = end
    if start != len(data):
        raise ValueError(f"tensors of {start} bytes, but {len(data)} came")
    return tensors
