"""Tensors that all ranks of a host can reach: each rank reads the others' memory in place.

A tensor's storage is moved into shared memory, as `Tensor.share_memory_` does, under the views that
exist of it; the other ranks map it through /proc. PyTorch takes that memory from /dev/shm, which
containers often keep small, so its room is asked for first. The file has lost its name by then:
nothing is left behind, whatever becomes of the process.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence

import torch

from farandole.comm.transports.base import Transport
from farandole.comm.transports.shm.segment import Segment, replace_pages

_ROOM = "/dev/shm"
_MARK_BYTES = 16


class Registered:
    """One tensor's storage as all ranks see it: `bytes[r]` is that of rank r."""

    def __init__(self, storage: torch.UntypedStorage, parts: Sequence[torch.Tensor]) -> None:
        self._storage = storage  # as long as it is kept, no other can have its address
        self.address = storage.data_ptr()
        self.bytes = list(parts)

    def take_back(self) -> None:
        """Puts memory of this process's own under the tensor, with the same numbers in it.

        Other ranks may still write to the shared memory; nobody sees it.
        """
        mine = torch.empty(0, dtype=torch.uint8).set_(self._storage)
        # The address stays the same, so that all views of the tensor, PyTorch's and the script's,
        # remain valid.
        numbers = mine.clone()
        replace_pages(self.address, self._storage.nbytes())
        mine.copy_(numbers)


def register(tensor: torch.Tensor, transport: Transport, pids: Sequence[int]) -> Registered:
    """Shares the storage of `tensor` between all ranks; raises `OSError` on all, or on none."""
    storage = tensor.untyped_storage()
    needed = 0 if storage.is_shared() else storage.nbytes()
    shared = [text.split() for text in transport.share(f"{needed} {_room_bytes()}")]
    wanted, room = sum(int(need) for need, _ in shared), min(int(room) for _, room in shared)
    # The file system hands out pages when they are first written. Without this check a write would
    # end the process with SIGBUS. All ranks compare the same numbers, so all of them raise, or
    # none.
    if wanted > room:
        raise OSError(
            f"{_ROOM} has room for {room / 2**20:.0f} MiB, and {wanted / 2**20:.0f} MiB are wanted"
        )
    descriptor, trouble = -1, ""
    try:
        descriptor = storage._share_fd_cpu_()[0]
        if not _is_backed_by(storage, descriptor):
            trouble = "its memory was shared before, by a group that has failed since"
    except RuntimeError as error:
        trouble = str(error)
    descriptors = [int(text) for text in transport.share(str(descriptor))]
    own = torch.empty(0, dtype=torch.uint8).set_(storage)
    parts: list[torch.Tensor] = []
    try:
        parts = [
            own
            if rank == transport.rank
            else Segment.open(pids[rank], descriptors[rank], storage.nbytes()).bytes
            for rank in range(transport.size)
        ]
    except OSError as error:
        trouble = trouble or str(error)
    for rank, theirs in enumerate(transport.share(trouble)):
        if theirs:
            raise OSError(f"rank {rank} cannot share memory: {theirs}")
    return Registered(storage, parts)


def _room_bytes() -> int:
    try:
        found = os.statvfs(_ROOM)
    except OSError:
        return 0
    return found.f_bavail * found.f_frsize


def _is_backed_by(storage: torch.UntypedStorage, descriptor: int) -> bool:
    """Whether what is written to the tensor can be read from the file: not after `take_back`."""
    begin = torch.empty(0, dtype=torch.uint8).set_(storage)[:_MARK_BYTES]
    before = begin.clone()
    mark = secrets.token_bytes(len(begin))
    begin.copy_(torch.frombuffer(bytearray(mark), dtype=torch.uint8))
    found = os.pread(descriptor, len(mark), 0)
    begin.copy_(before)
    return found == mark
