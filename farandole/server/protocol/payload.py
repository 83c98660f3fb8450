"""The tensors of messages, as bytes that travel or as places in memory that both ends see.

Each has an entry: its kind of number, its length, and where it is.

    small    with the entries, rounded up to 8 bytes: a frame of its own costs more than a copy
    frame    a frame of its own, which is the tensor's own memory: no copy
    arena    not sent at all: it lies in the arena of this connection, at this offset

Nothing that arrives is believed before it is checked: see wire.py, which uses this.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterator, Sequence

import torch

from farandole.errors import CommError, UserError
from farandole.server.filters.key_cache import DIGEST_BYTES, KeyReceiver, KeySender
from farandole.server.protocol.arena import Arena
from farandole.server.protocol.seal import MAX_FRAME_BYTES

ENTRY = struct.Struct("<BBxxxxxxQQ")  # dtype, place, offset in the arena, length in bytes
_SMALL, _FRAME, _ARENA = range(3)
_SMALL_BYTES = 4096
_DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
)
_CODES = {dtype: code for code, dtype in enumerate(_DTYPES)}


class Malformed(CommError):  # noqa: N818  (not an error here: somebody else's message)
    """These frames are no messages; the text says why."""


class UnknownKeys(Malformed):
    """A digest stands for a list of rows that is not here: the two ends must begin anew."""


class Outgoing:
    """Tensors on their way out: their entries, the bytes of small ones, the frames of others."""

    def __init__(self, arena: Arena | None, keys: KeySender | None = None) -> None:
        self.entries: list[bytes] = []
        self.small: list[bytes] = []
        self.frames: list[memoryview] = []
        self.frame_bytes = 0
        self._arena = arena
        self._keys = keys

    def shares(self, tensor: torch.Tensor) -> bool:
        return self._arena is not None and self._arena.locate(tensor) is not None

    def add_rows(self, rows: torch.Tensor) -> None:
        """A list that the other end knows goes as its digest."""
        packed = rows if self._keys is None else self._keys.pack(rows)
        if isinstance(packed, bytes):
            packed = torch.frombuffer(bytearray(packed), dtype=torch.uint8)
        self.add(packed)

    def add(self, tensor: torch.Tensor) -> None:
        assert tensor.dim() == 1, "the tensors of messages are flat"
        assert tensor.is_contiguous()
        assert tensor.device.type == "cpu"
        code, length = _CODES[tensor.dtype], tensor.nbytes
        offset = None if self._arena is None else self._arena.locate(tensor)
        if offset is not None:
            self.entries.append(ENTRY.pack(code, _ARENA, offset, length))
        elif length <= _SMALL_BYTES:
            self.entries.append(ENTRY.pack(code, _SMALL, 0, length))
            # `string_at` copies without building a NumPy view, which takes longer than to copy so
            # few bytes.
            self.small.append(ctypes.string_at(tensor.data_ptr(), length) + bytes(-length % 8))
        elif length <= MAX_FRAME_BYTES:
            self.entries.append(ENTRY.pack(code, _FRAME, 0, length))
            self.frames.append(tensor.view(torch.uint8).numpy().data)
            self.frame_bytes += length
        else:
            raise UserError(
                f"a tensor of {length} bytes cannot be sent: {MAX_FRAME_BYTES} is the most. "
                "Make several tables of this one."
            )


class Incoming:
    """Hands out the tensors in the order in which they were added. Raises `Malformed`."""

    def __init__(
        self,
        entries: memoryview,
        small: memoryview,
        frames: Sequence[bytes | memoryview],
        arena: Arena | None,
        keys: KeyReceiver | None = None,
    ) -> None:
        self._entries: Iterator[tuple[int, int, int, int]] = ENTRY.iter_unpack(entries)
        self._small = small
        self._small_at = 0
        self._frames = frames
        self._next_frame = 0
        self._arena = arena
        self._keys = keys

    def next_rows(self) -> torch.Tensor:
        """The next one, which is a list of rows, or stands for one."""
        packed = self.next()
        if packed.dtype is torch.uint8 and packed.numel() == DIGEST_BYTES:
            digest = packed.numpy().tobytes()
            rows = None if self._keys is None else self._keys.unpack(digest)
            if rows is None:
                raise UnknownKeys("a list of rows is not known here")
            return rows
        if packed.dtype is not torch.int64:
            raise Malformed(f"rows are given as {packed.dtype}, not as torch.int64")
        if self._keys is not None:
            self._keys.unpack(packed)
        return packed

    def next(self, *, shared: bool = False) -> torch.Tensor:
        """The next one. `shared`: it must be in the arena."""
        entry = next(self._entries, None)
        if entry is None:
            raise Malformed("there are fewer tensors than the messages have")
        code, place, offset, length = entry
        if code >= len(_DTYPES):
            raise Malformed(f"no kind of number has the code {code}")
        dtype = _DTYPES[code]
        if length % dtype.itemsize:
            raise Malformed(f"{length} bytes are not whole numbers of {dtype}")
        if place == _ARENA:
            return self._from_arena(offset, length, dtype)
        if place > _ARENA or offset or shared:
            raise Malformed(f"a tensor cannot be at place {place}, offset {offset}")
        return _tensor(self._from_small(length) if place == _SMALL else self._frame(length), dtype)

    def _from_arena(self, offset: int, length: int, dtype: torch.dtype) -> torch.Tensor:
        if self._arena is None:
            raise Malformed("a tensor lies in memory that is not shared")
        try:
            return self._arena.view(offset, length, dtype)
        except ValueError as error:
            raise Malformed(f"a tensor in shared memory: {error}") from None

    def _from_small(self, length: int) -> memoryview:
        begin = self._small_at
        self._small_at += length + -length % 8
        if self._small_at > len(self._small):
            raise Malformed(f"a tensor ends at byte {self._small_at} of {len(self._small)}")
        return self._small[begin : begin + length]

    def _frame(self, length: int) -> memoryview:
        if self._next_frame == len(self._frames):
            raise Malformed(f"there are fewer frames than tensors: {len(self._frames)}")
        frame = self._frames[self._next_frame]
        self._next_frame += 1
        if len(frame) != length:
            raise Malformed(f"a frame has {len(frame)} bytes, its tensor {length}")
        return memoryview(frame)

    def finish(self) -> None:
        """Everything must have been handed out."""
        if next(self._entries, None) is not None:
            raise Malformed("there are more tensors than the messages have")
        if self._small_at != len(self._small):
            raise Malformed(f"{len(self._small) - self._small_at} bytes belong to no tensor")
        if self._next_frame != len(self._frames):
            raise Malformed(f"{len(self._frames) - self._next_frame} frames belong to no tensor")


def _tensor(memory: memoryview, dtype: torch.dtype) -> torch.Tensor:
    """Over `memory`, which it keeps alive; over a copy where that is read-only or not aligned."""
    if not memory:
        return torch.empty(0, dtype=dtype)
    if memory.readonly:
        memory = memoryview(bytearray(memory))
    if dtype is torch.bool and torch.frombuffer(memory, dtype=torch.uint8).max() > 1:
        raise Malformed("a truth value is neither 0 nor 1")
    tensor = torch.frombuffer(memory, dtype=dtype)
    if tensor.data_ptr() % dtype.itemsize:
        tensor = torch.frombuffer(bytearray(memory), dtype=dtype)
    return tensor
