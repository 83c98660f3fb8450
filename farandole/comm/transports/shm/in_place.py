"""Registered memory is reduced where it lies.

Between two meetings of all ranks, each reduces the piece that it owns: it reads that piece from
everybody's memory and writes the result into everybody's. So a byte is read once and written once,
by one rank, and nobody copies anything afterwards. It goes block by block, small enough that what
was read is still in the core's cache when the result is written over it.
"""

from __future__ import annotations

from typing import Any

import torch

from farandole.comm.arithmetic import Op
from farandole.comm.kernels import Kernels, for_this_thread
from farandole.comm.transports.shm.registered import Registered
from farandole.schedule import piece

BLOCK_BYTES = 2**17  # for each thread that takes part
_KEPT_PIECES = 64

Block = list[Any]
"""The same elements in the memory of every rank."""


class OwnedPiece:
    """What one rank owns of a vector in registered memory."""

    def __init__(self, flat: torch.Tensor, found: Registered, rank: int) -> None:
        self._kernels: Kernels = for_this_thread(flat.dtype)
        begin = flat.storage_offset() * flat.itemsize
        vectors = [part[begin : begin + flat.nbytes].view(flat.dtype) for part in found.bytes]
        mine = piece(rank, len(vectors), flat.numel())
        length = max(1, BLOCK_BYTES * torch.get_num_threads() // flat.itemsize)
        pieces = [vector[mine.start : mine.stop].split(length) for vector in vectors]
        self._blocks: list[Block] = [
            [self._kernels.of(part) for part in parts] for parts in zip(*pieces, strict=True)
        ]

    def reduce(self, op: Op) -> None:
        """Into everybody's memory. Nobody else may touch this piece meanwhile."""
        reduce, copy = self._kernels.reduce, self._kernels.copy
        for block in self._blocks:
            result = block[0]
            reduce(result, block, op)
            for theirs in block[1:]:
                copy(theirs, result)


class OwnedPieces:
    """The pieces of one registered tensor's parts, which come again and again: to make views takes
    time."""

    def __init__(self, found: Registered, rank: int) -> None:
        self._found = found
        self._rank = rank
        self._made: dict[tuple[int, int, torch.dtype, int], OwnedPiece] = {}

    def of(self, flat: torch.Tensor) -> OwnedPiece:
        key = (int(flat.storage_offset()), flat.numel(), flat.dtype, torch.get_num_threads())
        made = self._made.get(key)
        if made is None:
            if len(self._made) >= _KEPT_PIECES:
                self._made.clear()
            made = self._made[key] = OwnedPiece(flat, self._found, self._rank)
        return made

    def take_back(self) -> None:
        """No other rank reaches this rank's memory from now on."""
        self._made.clear()
        self._found.take_back()
