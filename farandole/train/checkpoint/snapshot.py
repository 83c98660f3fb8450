"""A copy of a checkpoint's tensors that training cannot change any more, laid out as its files are.

The tensors of one part are copied into one buffer, in the order in which a safetensors file holds
them. Writing that file then needs no further copy: a header, and the buffer from its first byte to
its last. Buffers are kept for the next save, and pinned where tensors come from a GPU.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from farandole.serialization import pack

_NAMES: Final = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
}
"""What safetensors calls the types that it knows."""


@dataclass(frozen=True)
class PartSnapshot:
    """One part: its tree, and the bytes of its file; no file where it has no tensors."""

    tree: Any
    header: bytes = b""
    data: torch.Tensor | None = None
    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)  # within the data


class Snapshots:
    """Takes snapshots one after the other, all in the same memory."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, bool], torch.Tensor] = {}  # by name, and if pinned

    def take(self, parts: Mapping[str, Any]) -> dict[str, PartSnapshot]:
        """The parts as they are now. Raises `CheckpointError` for what a checkpoint cannot hold."""
        taken = {}
        gpus: set[torch.device] = set()
        for name, value in parts.items():
            tree, tensors = pack(value)
            if not tensors:
                taken[name] = PartSnapshot(tree)
                continue
            # From wide to narrow types: so each tensor begins at a multiple of its own width.
            ordered = dict(sorted(tensors.items(), key=lambda item: -item[1].element_size()))
            devices = {tensor.device for tensor in ordered.values() if tensor.is_cuda}
            gpus |= devices
            header, places = _header(ordered)
            size = sum(tensor.nbytes for tensor in ordered.values())
            buffer = self._buffer(name, size, pinned=bool(devices))
            copies = {
                key: _copy(ordered[key], buffer[begin:end]) for key, (begin, end) in places.items()
            }
            taken[name] = PartSnapshot(tree, header, buffer, copies)
        # Copies from a GPU are queued. The next step, which changes the tensors, is queued behind
        # them, but the thread that writes reads the host's memory, and no queue holds it back.
        for gpu in gpus:
            torch.cuda.synchronize(gpu)
        return taken

    def _buffer(self, name: str, size: int, *, pinned: bool) -> torch.Tensor:
        key = name, pinned
        if key not in self._buffers or self._buffers[key].numel() != size:
            self._buffers.pop(key, None)  # before there are two
            self._buffers[key] = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
        return self._buffers[key]


def _copy(tensor: torch.Tensor, into: torch.Tensor) -> torch.Tensor:
    if not tensor.numel():
        return torch.empty(tensor.shape, dtype=tensor.dtype)
    place = into.view(tensor.dtype).view(tensor.shape)
    return place.copy_(tensor.detach(), non_blocking=tensor.is_cuda)


def _header(tensors: Mapping[str, torch.Tensor]) -> tuple[bytes, dict[str, tuple[int, int]]]:
    """The first bytes of a safetensors file, and where each tensor's lie after them."""
    places, at = {}, 0
    for name, tensor in tensors.items():
        places[name] = (at, at + tensor.nbytes)
        at += tensor.nbytes
    described = {
        name: {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": list(places[name]),
        }
        for name, tensor in tensors.items()
    }
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data begin at a multiple of 8
    return len(text).to_bytes(8, "little") + text, places
