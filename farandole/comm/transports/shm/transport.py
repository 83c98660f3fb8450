"""Shared memory between the ranks of a host: no sockets, no copies through the kernel.

segment    the memory that all ranks of the host map, and the semaphores in it
layout     where things lie in it
connect    how the ranks come to share it
rounds     every rank writes into its slots, signals, waits, and reads the others' slots
all_reduce, chunks, in_place, registered      all-reduce, by size and by where the tensor lies
channels, frames                              messages between two ranks
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from datetime import timedelta

import torch

from farandole.comm.arithmetic import Op, reduce_into
from farandole.comm.failure_evidence import who_have_left, who_is_missing
from farandole.comm.transports.base import Transport
from farandole.comm.transports.messages import Message, PeerLost
from farandole.comm.transports.shm import channels
from farandole.comm.transports.shm.all_reduce import SharedMemoryAllReduce
from farandole.comm.transports.shm.connect import SharedSegment, share_segment
from farandole.comm.transports.shm.frames import Frames
from farandole.comm.transports.shm.rounds import Rounds
from farandole.comm.transports.shm.segment import Peers, Semaphores, Statements
from farandole.comm.transports.subset import Subset


class SharedMemory(Transport):
    """Between processes of one host that can see each other in /proc. Made by `connect`."""

    name = "shm"
    native_is_fastest = True

    def __init__(self, shared: SharedSegment, rank: int, timeout: timedelta) -> None:
        segment, layout = shared.segment, shared.layout
        size = layout.size
        super().__init__(rank, size, timeout)
        self._pids = shared.pids
        self._peers = Peers(shared.pids, rank)
        spin = size <= len(os.sched_getaffinity(0))
        self._statements = Statements(segment.bytes[layout.statements :].view(size, size), rank)
        semaphores = Semaphores(
            segment, 0, self._peers, timeout, statements=self._statements, spin=spin
        )
        self._rounds = Rounds(segment, layout, rank, semaphores)
        self._all_reduce = SharedMemoryAllReduce(
            self._rounds, layout.slot_bytes, ranks_take_turns=not spin
        )
        memory = segment.bytes[layout.channels : layout.token]
        self._channels = channels.Channels(
            rank,
            size,
            memory.view(size**2, channels.SLOTS, layout.channel_bytes),
            semaphores,
            2 * size**2,
        )

    @classmethod
    def connect(cls, via: Transport, *, messages_only: bool = False) -> SharedMemory:
        """The ranks of `via`, over shared memory. Raises `OSError` on all of them, or on none."""
        return cls(share_segment(via, messages_only=messages_only), via.rank, via.timeout)

    def subgroup(self, ranks: Sequence[int], *, messages_only: bool = False) -> Transport:
        via = Subset(self, ranks)
        try:
            return SharedMemory.connect(via, messages_only=messages_only)
        except OSError:  # no more memory: messages between two go on working
            return via

    def channel(self, ranks: Sequence[int]) -> Transport:
        return self.subgroup(ranks, messages_only=True)

    def frames(self, peer: int) -> Frames:
        return Frames(self._channels, peer)

    def blame(self, lost: PeerLost) -> PeerLost:
        def has_ended(rank: int) -> bool:
            return not self._peers.lives(rank)

        missing = who_is_missing(self._statements, self.rank, lost.ranks, has_ended)
        ended = [rank for rank in missing if has_ended(rank)]
        if ended:
            return PeerLost(ended, "has ended" if len(ended) == 1 else "have ended")
        if missing == who_have_left(self._statements.read()):
            return PeerLost(missing, "has left" if len(missing) == 1 else "have left")
        return PeerLost.late(missing, self.timeout.total_seconds())

    def close(self) -> None:
        """The memory goes when the last tensor that lies in it does, or the process ends."""
        self._peers.close()

    # Agreement

    def share(self, claim: str) -> list[str]:
        row = self._rounds.claim(claim)
        self._rounds.meet()
        return self._rounds.claims(row)

    def agree(self, claim: str) -> None:
        row = self._rounds.claim(claim)
        self._rounds.meet()
        self._rounds.require_same(row)

    def begin_agree(self, claim: str) -> int:
        """The first half of `agree`, which waits for nobody. `end_agree` wants what it returns;
        before that, this transport can do nothing else."""
        rounds = self._rounds
        claimed = rounds.claim(claim)
        rounds.signal(0)
        return claimed

    def end_agree(self, claimed: int) -> None:
        rounds = self._rounds
        rounds.wait(0)
        rounds.require_same(claimed)

    # Collectives

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        self._channels.exchange(sends, receives)

    def register(self, tensor: torch.Tensor) -> AbstractContextManager[object]:
        self.agree(f"register({tensor.untyped_storage().nbytes()} bytes)")
        return self._all_reduce.register(tensor, self, self._pids)

    def native_all_reduce(self, flat: torch.Tensor, op: Op, claim: str | None) -> None:
        self._all_reduce.run(flat, op, claim)

    def reduce_if_agreed(
        self, claim: str, source: torch.Tensor, into: torch.Tensor, op: Op, algorithm: str
    ) -> list[str]:
        if not self._all_reduce.goes_with_claim(source):
            return super().reduce_if_agreed(claim, source, into, op, algorithm)
        return self._all_reduce.if_agreed(claim, source, into, op)

    def reduce_scatter(self, flat: torch.Tensor, counts: Sequence[int], op: Op) -> torch.Tensor:
        slots = self._rounds.views(flat.dtype)
        width = slots[0][0].numel() // self.size  # of what goes to each rank in one step
        outgoing = [part.split(width) for part in flat.split(list(counts))]
        own = outgoing[self.rank]
        result = flat.new_empty(counts[self.rank])
        results = result.split(width)

        def publish(step: int, slot: int) -> None:
            for peer in self.others:
                if step < len(outgoing[peer]):
                    part = outgoing[peer][step]
                    slots[self.rank][slot].narrow(0, peer * width, part.numel()).copy_(part)

        def collect(step: int, slot: int) -> None:
            if step < len(results):
                begin, length = self.rank * width, results[step].numel()
                parts = [of_rank[slot].narrow(0, begin, length) for of_rank in slots]
                parts[self.rank] = own[step]
                reduce_into(results[step], parts, op)

        self._rounds.stream(-(-max(counts) // width), publish, collect)
        return result

    def all_gather(self, mine: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        slots = self._rounds.views(mine.dtype)
        width = slots[0][0].numel()
        everything = mine.new_empty(sum(counts))
        parts = everything.split(list(counts))
        parts[self.rank].copy_(mine)
        chunks = [part.split(width) for part in parts]

        def publish(step: int, slot: int) -> None:
            if step < len(chunks[self.rank]):
                chunk = chunks[self.rank][step]
                slots[self.rank][slot][: chunk.numel()].copy_(chunk)

        def collect(step: int, slot: int) -> None:
            for peer in self.others:
                if step < len(chunks[peer]):
                    chunk = chunks[peer][step]
                    chunk.copy_(slots[peer][slot][: chunk.numel()])

        self._rounds.stream(-(-max(counts) // width), publish, collect)
        return everything

    def broadcast(self, flat: torch.Tensor, source: int) -> None:
        slots = self._rounds.views(flat.dtype)[source]
        chunks = flat.split(slots[0].numel())

        def publish(step: int, slot: int) -> None:
            if self.rank == source:
                slots[slot][: chunks[step].numel()].copy_(chunks[step])

        def collect(step: int, slot: int) -> None:
            if self.rank != source:
                chunks[step].copy_(slots[slot][: chunks[step].numel()])

        self._rounds.stream(len(chunks) if flat.numel() else 0, publish, collect)
