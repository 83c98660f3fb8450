"""Memory of a client that the servers on its host map: tensors there are not sent, but pointed to.

The client makes it, and describes it in its Hello. A server opens it through /proc, if it can be
sure that this is that memory: the same boot of the same machine, a process of the same user, a file
of the right kind and length, and in its first bytes what the description says. Where one of these
is not so, nothing is shared, and tensors travel as messages.
"""

from __future__ import annotations

import bisect
import os
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path

import torch

from farandole.comm.transports.shm.segment import Segment
from farandole.errors import CommError

_ALIGNMENT = 64  # a cache line; every dtype's numbers lie right
_TOKEN_BYTES = 16
_HEAD_BYTES = _ALIGNMENT  # what the token takes, so that what follows is aligned


class NotShared(CommError):  # noqa: N818  (not an error: then tensors are sent)
    """The memory described cannot be opened here; the text says why."""


class Spans:
    """Which parts of a length are free. A request gets the first that is long enough."""

    def __init__(self, length: int) -> None:
        self._free = [(0, length)] if length else []  # (offset, length), never two side by side
        self._taken: dict[int, int] = {}

    def take(self, length: int) -> int | None:
        for place, (offset, room) in enumerate(self._free):
            if room >= length:
                rest = [(offset + length, room - length)] if room > length else []
                self._free[place : place + 1] = rest
                self._taken[offset] = length
                return offset
        return None

    def give_back(self, offset: int) -> None:
        assert offset in self._taken, f"nothing at {offset} is taken"
        begin, end = offset, offset + self._taken.pop(offset)
        place = bisect.bisect(self._free, (offset,))
        first, last = place, place
        # Free neighbours become one, so that large requests still find room after many small ones.
        if place > 0 and sum(self._free[place - 1]) == begin:
            first, begin = place - 1, self._free[place - 1][0]
        if place < len(self._free) and self._free[place][0] == end:
            last, end = place + 1, sum(self._free[place])
        self._free[first:last] = [(begin, end - begin)]


class Arena:
    """Made by a client with `make`, or opened by a server with `open`. For one thread."""

    def __init__(self, segment: Segment, token: str, room: int, *, made: bool) -> None:
        self.length = segment.length - _HEAD_BYTES
        self._segment = segment
        self._base = segment.address + _HEAD_BYTES
        self._token = token
        self._spans = Spans(room)
        self._made = made

    @classmethod
    def make(cls, length: int) -> Arena:
        """`length` bytes, set aside at once. Raises `OSError` when there is no room."""
        assert length > 0
        rounded = _round_up(length)
        # Only the head is set aside; pages of the rest are taken when they are first written.
        segment = Segment.make(_HEAD_BYTES + rounded, committed=_HEAD_BYTES)
        token = secrets.token_bytes(_TOKEN_BYTES)
        segment.memory[:_TOKEN_BYTES] = token
        return cls(segment, token.hex(), rounded, made=True)

    @classmethod
    def open(cls, description: Mapping[str, object], uid: int) -> Arena:
        """What another process of user `uid` described. Nothing can be taken from it here.

        Raises `NotShared`.
        """
        match description:
            case {
                "boot": str(boot),
                "pid": int(pid),
                "descriptor": int(descriptor),
                "length": int(length),
                "token": str(token),
            } if pid > 0 and descriptor >= 0 and length > _HEAD_BYTES:
                pass
            case _:
                raise NotShared("the description of the memory is incomplete")
        if boot != _boot():
            raise NotShared("it is on another host")
        process = Path(f"/proc/{pid}")
        try:
            owner = process.stat().st_uid
            if owner != uid:
                raise NotShared(f"process {pid} belongs to user {owner}, not to user {uid}")
            # Looked at before it is opened: in another container this may be any file at all.
            file = (process / "fd" / str(descriptor)).stat()
            if not stat.S_ISREG(file.st_mode) or file.st_uid != uid or file.st_size != length:
                raise NotShared(
                    f"descriptor {descriptor} of process {pid} is not shared memory of "
                    f"{length} bytes of user {uid}"
                )
            segment = Segment.open(pid, descriptor, length)
        except (OSError, ValueError) as error:
            raise NotShared(f"cannot open the memory of process {pid}: {error}") from None
        if segment.memory[:_TOKEN_BYTES].hex() != token:
            raise NotShared(f"process {pid} is another one here: not the same /proc")
        return cls(segment, token, 0, made=False)

    def describe(self) -> dict[str, object]:
        return {
            "boot": _boot(),
            "pid": os.getpid(),
            "descriptor": self._segment.descriptor,
            "length": self._segment.length,
            "token": self._token,
        }

    def take(self, length: int) -> torch.Tensor | None:
        """`length` bytes, aligned to 64, to be given back; or `None` where there is no room."""
        assert length > 0
        offset = self._spans.take(_round_up(length))
        return None if offset is None else self.view(offset, length)

    def give_back(self, taken: torch.Tensor) -> None:
        """What `take` returned, or any view that begins where it does."""
        offset = self.locate(taken)
        assert offset is not None, "this does not lie in the arena"
        self._spans.give_back(offset)

    def locate(self, tensor: torch.Tensor) -> int | None:
        """Where in the arena a contiguous tensor lies, if all of it does and it is not empty."""
        offset = tensor.data_ptr() - self._base
        length = tensor.nbytes
        return offset if length and 0 <= offset <= self.length - length else None

    def view(self, offset: int, length: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        """`length` bytes from `offset` on, seen as numbers.

        Raises `ValueError` where they are outside, or cannot be numbers of that kind.
        """
        if length <= 0 or not 0 <= offset <= self.length - length:
            raise ValueError(f"{length} bytes at {offset} are outside of {self.length}")
        if offset % dtype.itemsize or length % dtype.itemsize:
            raise ValueError(f"{length} bytes at {offset} are not aligned numbers of {dtype}")
        return torch.frombuffer(
            self._segment.memory,
            dtype=dtype,
            count=length // dtype.itemsize,
            offset=_HEAD_BYTES + offset,
        )

    def close(self) -> None:
        """From now on nobody else can open it. The memory goes when its last tensor does."""
        if self._made:
            os.close(self._segment.descriptor)
            self._made = False


def _round_up(length: int) -> int:
    return -(-length // _ALIGNMENT) * _ALIGNMENT


def _boot() -> str:
    """The same for all processes between two starts of a machine, and nowhere else."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
