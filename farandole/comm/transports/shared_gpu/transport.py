"""All-reduces between ranks that share GPUs, where NCCL refuses to serve them.

For two GPUs of two ranks each:

    1. on the GPU     0 → its slot   1 → its slot     each copies what it contributes
    2. on the GPU     0 sums one half of both slots, 1 the other, into its own slot
    3. between GPUs   0 ⇄ 2   1 ⇄ 3                   each half by NCCL: one rank a GPU takes part
    4. on the GPU     each reads the halves of the sum from both slots

Nothing passes through the memory of the host. The hosts only meet, twice, so that no stream waits
for an event before it is recorded; the GPU goes on by itself. What is small is not cut into pieces:
each rank sums all of it, and the hosts meet once.

Sums are in the order of ranks, so all ranks have the same bits. Messages between two ranks, and
what is made of them, go through the host.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch

from farandole.comm.arithmetic import Op, divide_, reduce_into
from farandole.comm.gpu.cuda_graphs import refuse_capture
from farandole.comm.transports.base import Transport
from farandole.comm.transports.c10d import C10d
from farandole.comm.transports.messages import Message, numbered
from farandole.comm.transports.shared_gpu.staging import SLOTS, Slot, share_slots
from farandole.schedule import piece_bounds

SLOT_BYTES = 32 * 2**20
_SMALL_BYTES = 256 * 2**10
_ADDS = {"average": "sum"}


class SharedGpu(Transport):
    """`host` carries what is not an all-reduce; `near` are the ranks of this GPU, and `across` the
    NCCL group of this rank's counterparts on the other GPUs, if there are any."""

    name = "gpu"
    needs_the_host = True

    def __init__(
        self,
        host: Transport,
        near: Transport,
        ranks_here: Sequence[int],
        slots: Sequence[Sequence[Slot]],
        across: C10d | None,
        device: torch.device,
    ) -> None:
        super().__init__(host.rank, host.size, host.timeout, host.topology)
        self._device = device
        self._host = host
        self._near = near
        self._here = ranks_here
        self._slots = slots
        self._across = across
        self._turn = 0

    @classmethod
    def connect(cls, host: Transport, world: C10d, device: torch.device) -> SharedGpu | None:
        """All ranks of `host` and `world`, which are the same, call it. None, on all of them, where
        they cannot: GPUs with different numbers of ranks, or no memory to share."""
        able = device.type == "cuda" and torch.cuda.is_available()
        gpu = str(torch.cuda.get_device_properties(device).uuid) if able else ""
        gpus = host.share(gpu)
        if "" in gpus:
            return None
        # Two hosts have no GPU in common, so its number identifies it.
        here = [rank for rank, theirs in enumerate(gpus) if theirs == gpu]
        if len(set(Counter(gpus).values())) > 1 or len(here) == 1:
            return None
        near = host if len(here) == host.size else host.subgroup(here)
        problem = ""
        slots: list[list[Slot]] = []
        with numbered(here) if near is not host else nullcontext():
            try:
                slots = share_slots(near, SLOT_BYTES, device)
            except RuntimeError as error:
                problem = str(error)
        if any(host.share(problem[:200])):
            return None
        across = None
        if len(here) < host.size:
            place = here.index(host.rank)
            lanes = [rank for rank in range(host.size) if _place(gpus, rank) == place]
            across = world.nccl_subgroup(lanes)
        return cls(host, near, here, slots, across, device)

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        landing = [(peer, into.cpu()) for peer, into in receives]
        self._host.exchange([(peer, data.cpu()) for peer, data in sends], landing)
        for (_, into), (_, arrived) in zip(receives, landing, strict=True):
            into.copy_(arrived)

    def share(self, claim: str) -> list[str]:
        return self._host.share(claim)

    def subgroup(self, ranks: Sequence[int]) -> Transport:
        raise AssertionError("`ByDevice` makes subgroups, by `between`: they need a world too")

    def between(self, host: Transport, world: C10d) -> SharedGpu | None:
        """The same for some of the ranks, whom these two connect."""
        return SharedGpu.connect(host, world, self._device)

    def native_all_reduce(self, flat: torch.Tensor, op: Op, claim: str | None) -> None:
        if claim is not None:
            self._host.agree(claim)
        refuse_capture("an all-reduce for which the hosts meet")
        flat.record_stream(torch.cuda.current_stream())
        for block in flat.split(SLOT_BYTES // flat.itemsize):
            self._reduce(block, op)
        divide_(flat, op, self.size)

    def _reduce(self, block: torch.Tensor, op: Op) -> None:
        """On the current stream; the host waits for the other hosts only."""
        stream = torch.cuda.current_stream()
        turn, self._turn = self._turn, (self._turn + 1) % SLOTS
        slots = [theirs[turn] for theirs in self._slots]
        mine = slots[self._near.rank]
        count, dtype = block.numel(), block.dtype
        adds: Any = _ADDS.get(op, op)  # divided once, when all are in
        for slot in slots:  # the turn before the last: all have met since
            stream.wait_event(slot.collected)
        mine.part(0, count, dtype).copy_(block)
        mine.copied.record(stream)
        self._meet()
        for slot in slots:
            stream.wait_event(slot.copied)
        if block.nbytes <= _SMALL_BYTES and self._across is None:
            reduce_into(block, [slot.part(0, count, dtype) for slot in slots], adds)
        else:
            bounds = piece_bounds(len(slots), count).tolist()
            self._reduce_piece(slots, bounds, dtype, adds)
            mine.reduced.record(stream)
            self._meet()
            for slot in slots:
                stream.wait_event(slot.reduced)
            for place, slot in enumerate(slots):
                begin, end = bounds[place], bounds[place + 1]
                block[begin:end].copy_(slot.part(begin, end - begin, dtype))
        mine.collected.record(stream)

    def _reduce_piece(
        self, slots: Sequence[Slot], bounds: Sequence[int], dtype: torch.dtype, op: Any
    ) -> None:
        """Steps 2 and 3, of the piece in this rank's charge. No other rank reads it before."""
        place = self._near.rank
        begin, count = bounds[place], bounds[place + 1] - bounds[place]
        if not count:
            return
        piece = slots[place].part(begin, count, dtype)
        parts = [
            piece if other == place else slot.part(begin, count, dtype)
            for other, slot in enumerate(slots)
        ]
        reduce_into(piece, parts, op)
        if self._across is not None:
            self._across.all_reduce(piece, op, "native", None)

    def _meet(self) -> None:
        with numbered(self._here) if self._near is not self._host else nullcontext():
            self._near.share("")


def _place(gpus: Sequence[str], rank: int) -> int:
    """Of a rank among those of its GPU."""
    return list(gpus[:rank]).count(gpus[rank])
