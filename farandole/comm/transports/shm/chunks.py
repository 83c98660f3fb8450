"""A vector too large for a slot, cut into chunks that take turns in the slots."""

from __future__ import annotations

import torch

from farandole.comm.arithmetic import Op, reduce_into
from farandole.comm.transports.shm.layout import SLOTS
from farandole.schedule import piece


class Chunks:
    """A vector cut into chunks of a slot, each cut into one piece per rank, its owner."""

    def __init__(self, flat: torch.Tensor, slots: list[list[torch.Tensor]], rank: int) -> None:
        self._rank = rank
        self._slots = slots
        self._others = [peer for peer in range(len(slots)) if peer != rank]
        self._chunks = flat.split(slots[0][0].numel())
        # All chunks but the last are cut in the same places.
        self._full = self._cut(self._chunks[0].numel())
        self._last = self._cut(self._chunks[-1].numel())

    def __len__(self) -> int:
        return len(self._chunks)

    def _cut(self, length: int) -> list[slice]:
        pieces = [piece(rank, len(self._slots), length) for rank in range(len(self._slots))]
        return [slice(part.start, part.stop) for part in pieces]

    def _cuts(self, index: int) -> list[slice]:
        return self._last if index == len(self._chunks) - 1 else self._full

    def publish(self, index: int, slot: int) -> None:
        cuts, chunk = self._cuts(index), self._chunks[index]
        mine = self._slots[self._rank][slot % SLOTS]
        for peer in self._others:
            mine[cuts[peer]].copy_(chunk[cuts[peer]])

    def reduce(self, index: int, slot: int, op: Op) -> None:
        cut = self._cuts(index)[self._rank]
        own = self._chunks[index][cut]
        parts = [of_rank[slot % SLOTS][cut] for of_rank in self._slots]
        parts[self._rank] = own
        # My own cut of my slot is free: in `publish` only what others own is written there. And no
        # other rank reads it before my second signal.
        result = self._slots[self._rank][slot % SLOTS][cut]
        reduce_into(result, parts, op)
        own.copy_(result)

    def collect(self, index: int, slot: int) -> None:
        cuts, chunk = self._cuts(index), self._chunks[index]
        for peer in self._others:
            chunk[cuts[peer]].copy_(self._slots[peer][slot % SLOTS][cuts[peer]])
