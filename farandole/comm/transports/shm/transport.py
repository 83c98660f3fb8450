"""Shared memory between the ranks of a host: no sockets, no copies through the kernel.

Every rank has a few slots in one segment. In each round it writes into a slot of its own, tells
the others, waits until they have told it, and reads theirs. A small all-reduce is one round: each
rank adds up everybody's slot, in rank order. A large one goes chunk by chunk, in a pipeline:

    chunk             0          1          2
    1. publish     ─ write ─▶ ─ write ─▶                what other ranks own goes into my slot
    2. reduce              ─ add, write ─▶ ─ add, …     what I own: mine and theirs, into my slot
    3. collect                          ─ read ─▶       what they own, from their slots

so that a rank publishes chunk i + 1 before it waits for chunk i, and one wait is hidden behind the
other ranks' work. Each element is added up by one rank, in rank order, and copied by the others:
all get the same bits, the same every time, wherever the element stands in the vector.

When may a slot be written again? A rank that has seen everybody's signal 2 for chunk i - 2 (it has,
before it publishes chunk i + 1) knows that all have left the turn before that one, and so have
collected chunk i - 4. Five slots would do; there are six. In rounds with one signal, and between
collectives, the distance is shorter.
"""

from __future__ import annotations

import itertools
import json
import os
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from datetime import timedelta
from typing import Any

import torch

from farandole.comm.arithmetic import Op, reduce_into
from farandole.comm.failure_evidence import who_have_left, who_is_missing
from farandole.comm.kernels import Kernels, for_short
from farandole.comm.transports.base import (
    CLAIM_BYTES,
    Message,
    PeerLost,
    Transport,
    decode_claim,
    encode_claim,
    require_agreement,
)
from farandole.comm.transports.shm import channels
from farandole.comm.transports.shm.chunks import Chunks
from farandole.comm.transports.shm.frames import Frames
from farandole.comm.transports.shm.in_place import Pieces
from farandole.comm.transports.shm.layout import CLAIMS, SLOTS, Layout, make
from farandole.comm.transports.shm.registered import register
from farandole.comm.transports.shm.segment import (
    Peers,
    Segment,
    Semaphores,
    Statements,
)
from farandole.comm.transports.subset import Subset

_SMALL_BYTES = 2**20  # divided by the ranks: up to there one round, in which all add up all, pays
_IN_PLACE_BYTES = 2**16  # registered memory: up to there
_KEPT_VIEWS = 64


class SharedMemory(Transport):
    """Between processes of one host that can see each other in /proc. Made by `connect`."""

    name = "shm"
    native_is_fastest = True

    def __init__(
        self, segment: Segment, layout: Layout, rank: int, pids: Sequence[int], timeout: timedelta
    ) -> None:
        size = layout.size
        super().__init__(rank, size, timeout)
        self._segment = segment
        self._pids = tuple(pids)
        self._peers = Peers(pids, rank)
        spin = size <= len(os.sched_getaffinity(0))
        # Where ranks must take turns on the cores, a round takes longer.
        small_bytes = (_SMALL_BYTES if spin else 2 * _SMALL_BYTES) // size
        self._small_bytes = min(small_bytes, layout.slot_bytes)
        self._in_place_bytes = min(_IN_PLACE_BYTES, self._small_bytes)
        self._statements = Statements(segment.bytes[layout.statements :].view(size, size), rank)
        self._semaphores = Semaphores(
            segment, 0, self._peers, timeout, statements=self._statements, spin=spin
        )
        self._claims = layout.claims
        self._parts: dict[tuple[torch.dtype, int], tuple[Kernels, list[list[Any]]]] = {}
        slots = segment.bytes[layout.slots : layout.channels]
        self._slots = slots.view(size, SLOTS, layout.slot_bytes)
        self._typed: dict[torch.dtype, list[list[torch.Tensor]]] = {}
        memory = segment.bytes[layout.channels : layout.token]
        self._channels = channels.Channels(
            rank,
            size,
            memory.view(size**2, channels.SLOTS, layout.channel_bytes),
            self._semaphores,
            2 * size**2,
        )
        # By kind of signal: the semaphores to post, and those to wait on with who posts them.
        address, kinds = self._semaphores.address, (0, size**2)
        self._signalled = [
            [address(kind + rank * size + peer) for peer in self.others] for kind in kinds
        ]
        self._awaited = [
            [(address(kind + peer * size + rank), peer) for peer in self.others] for kind in kinds
        ]
        self._registered: dict[int, Pieces] = {}  # by the address of the storage
        self._warned = False
        self._next_slot = 0
        self._next_claim = 0

    @classmethod
    def connect(cls, via: Transport, *, messages_only: bool = False) -> SharedMemory:
        """The ranks of `via`, over shared memory. Raises `OSError` on all of them, or on none."""
        pids = [int(pid) for pid in via.share(str(os.getpid()))]
        layout = Layout.for_messages(via.size) if messages_only else Layout(via.size)
        segment, told = None, ""
        try:
            if via.rank == 0:
                segment, token = make(layout, via.timeout)
                told = json.dumps([segment.descriptor, token])
        except (OSError, AttributeError) as error:
            told = f"cannot make shared memory: {error}"
        offer = via.share(told)[0]
        failure = "" if offer.startswith("[") else offer
        try:
            if via.rank != 0 and not failure:
                descriptor, token = json.loads(offer)
                segment = Segment.open(pids[0], descriptor, layout.length)
                if segment.bytes[layout.token : layout.statements].numpy().tobytes().hex() != token:
                    failure = f"process {pids[0]} is another one here: not the same /proc"
        except OSError as error:
            failure = f"cannot open the shared memory of process {pids[0]}: {error}"
        failures = via.share(failure)
        if via.rank == 0 and segment is not None:
            os.close(segment.descriptor)  # all who could have opened it; the mapping stays
        for rank, trouble in enumerate(failures):
            if trouble:
                raise OSError(f"rank {rank} {trouble}")
        assert segment is not None
        return cls(segment, layout, via.rank, pids, via.timeout)

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
        return PeerLost(missing, f"did not answer within {self.timeout.total_seconds():g} s")

    def close(self) -> None:
        """The memory goes when the last tensor that lies in it does, or the process ends."""
        self._peers.close()

    # Rounds

    def _signal(self, kind: int) -> None:
        self._semaphores.post_all(self._signalled[kind])

    def _await(self, kind: int) -> None:
        self._semaphores.wait_all(self._awaited[kind])

    def _take_slots(self, count: int) -> int:
        first = self._next_slot
        self._next_slot += count
        return first

    def _views(self, dtype: torch.dtype) -> list[list[torch.Tensor]]:
        """Every slot of every rank as numbers of a kind."""
        if dtype not in self._typed:
            typed = self._slots.view(dtype)
            self._typed[dtype] = [list(of_rank.unbind()) for of_rank in typed.unbind()]
        return self._typed[dtype]

    def _stream(
        self, steps: int, publish: Callable[[int, int], None], collect: Callable[[int, int], None]
    ) -> None:
        """Rounds of one signal: publish(step, slot) on every rank, then collect(step, slot)."""
        first = self._take_slots(steps)
        for step in range(steps + 1):
            if step < steps:
                publish(step, (first + step) % SLOTS)
                self._signal(0)
            if step > 0:
                self._await(0)
                collect(step - 1, (first + step - 1) % SLOTS)

    # Agreement

    def _claim(self, claim: str) -> int:
        """Writes down what this rank is about to do; says where, for `_require_same`."""
        row = self._claims + self._next_claim % CLAIMS * self.size * CLAIM_BYTES
        self._next_claim += 1
        begin = row + self.rank * CLAIM_BYTES
        self._segment.memory[begin : begin + CLAIM_BYTES] = encode_claim(claim)
        return row

    def _frames(self, row: int) -> list[bytes]:
        ends = range(row, row + (self.size + 1) * CLAIM_BYTES, CLAIM_BYTES)
        memory = self._segment.memory
        return [memory[begin:end] for begin, end in itertools.pairwise(ends)]

    def _require_same(self, row: int) -> None:
        if not self._all_same(row):
            require_agreement([decode_claim(frame) for frame in self._frames(row)])

    def _all_same(self, row: int) -> bool:
        frames = self._segment.memory[row : row + self.size * CLAIM_BYTES]
        return frames == frames[:CLAIM_BYTES] * self.size

    def share(self, claim: str) -> list[str]:
        row = self._claim(claim)
        self._signal(0)
        self._await(0)
        return [decode_claim(frame) for frame in self._frames(row)]

    def agree(self, claim: str) -> None:
        row = self._claim(claim)
        self._signal(0)
        self._await(0)
        self._require_same(row)

    # Collectives

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        self._channels.exchange(sends, receives)

    def register(self, tensor: torch.Tensor) -> AbstractContextManager[object]:
        self.agree(f"register({tensor.untyped_storage().nbytes()} bytes)")
        if tensor.nbytes <= self._in_place_bytes:
            return nullcontext()  # these are faster through a slot
        try:
            found = register(tensor, self, self._pids)
        except OSError as error:
            if self.rank == 0 and not self._warned:
                warnings.warn(
                    f"{error}, so gradients are copied once more on their way. In a container give "
                    "/dev/shm more room: docker run --shm-size=4g.",
                    stacklevel=2,
                )
            self._warned = True
            return nullcontext()
        self._registered[found.address] = Pieces(found, self.rank)
        forget = ExitStack()
        forget.callback(self._registered.pop, found.address, None)
        return forget

    def native_all_reduce(self, flat: torch.Tensor, op: Op, claim: str | None) -> None:
        claim = claim or "all_reduce of what is known to agree"
        if flat.nbytes <= self._in_place_bytes:
            self._reduce_at_once(flat, op, self._claim(claim))
            return
        pieces = self._registered.get(flat.untyped_storage().data_ptr())
        if pieces is not None:
            row = self._claim(f"{claim} registered at {flat.storage_offset()}")
            self._reduce_in_place(flat, op, row, pieces)
        elif flat.nbytes <= self._small_bytes:
            self._reduce_at_once(flat, op, self._claim(claim))
        else:
            self._reduce_by_chunks(flat, op, self._claim(claim))

    def _reduce_at_once(self, flat: torch.Tensor, op: Op, row: int) -> None:
        kernels, slots = self._parts_of(flat)
        parts, vector = slots[self._next_slot % SLOTS], kernels.of(flat)
        kernels.copy(parts[self.rank], vector)
        self._signal(0)
        self._await(0)
        self._require_same(row)
        self._take_slots(1)  # only now: whoever called something else has taken none
        kernels.reduce(vector, parts, op)

    def reduce_if_agreed(
        self, claim: str, source: torch.Tensor, into: torch.Tensor, op: Op, algorithm: str
    ) -> list[str]:
        """What is small goes along with the claim, in one round."""
        if source.nbytes > self._small_bytes:
            return super().reduce_if_agreed(claim, source, into, op, algorithm)
        row = self._claim(claim)
        # Taken only if all agree: a rank that merely shares its claim takes none.
        kernels, slots = self._parts_of(source)
        parts = slots[self._next_slot % SLOTS]
        kernels.copy(parts[self.rank], kernels.of(source))
        self._signal(0)
        self._await(0)
        if not self._all_same(row):
            return [decode_claim(frame) for frame in self._frames(row)]
        self._take_slots(1)
        kernels.reduce(kernels.of(into), parts, op)
        return [claim] * self.size

    def _parts_of(self, flat: torch.Tensor) -> tuple[Kernels, list[list[Any]]]:
        """For each slot, room for `flat` on every rank. To make views takes time."""
        key = flat.dtype, flat.numel()
        if key not in self._parts:
            if len(self._parts) >= _KEPT_VIEWS:
                self._parts.clear()
            kernels = for_short(flat.dtype, flat.nbytes)
            slots = zip(*self._views(flat.dtype), strict=True)
            self._parts[key] = (
                kernels,
                [[kernels.of(of_rank[: flat.numel()]) for of_rank in slot] for slot in slots],
            )
        return self._parts[key]

    def _reduce_in_place(self, flat: torch.Tensor, op: Op, row: int, pieces: Pieces) -> None:
        """Each rank reduces the piece that it owns, in everybody's memory."""
        mine = pieces.of(flat)
        try:
            self._signal(0)
            self._await(0)
            if self._all_same(row):
                mine.reduce(op)
                self._signal(1)
                self._await(1)
                return
        except BaseException:
            # Who goes on without the others must not be written to by one who comes late.
            pieces.take_back()
            raise
        self._require_same(row)

    def _reduce_by_chunks(self, flat: torch.Tensor, op: Op, row: int) -> None:
        chunks = Chunks(flat, self._views(flat.dtype), self.rank)
        first = self._next_slot
        chunks.publish(0, first)
        self._signal(0)
        self._await(0)
        self._require_same(row)  # before anything depends on the length
        self._take_slots(len(chunks))
        for index in range(len(chunks)):
            if index + 1 < len(chunks):
                chunks.publish(index + 1, first + index + 1)
                self._signal(0)
            if index > 0:
                self._await(0)
            chunks.reduce(index, first + index, op)
            self._signal(1)
            if index > 0:
                self._await(1)
                chunks.collect(index - 1, first + index - 1)
        self._await(1)
        chunks.collect(len(chunks) - 1, first + len(chunks) - 1)

    def reduce_scatter(self, flat: torch.Tensor, counts: Sequence[int], op: Op) -> torch.Tensor:
        slots = self._views(flat.dtype)
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

        self._stream(-(-max(counts) // width), publish, collect)
        return result

    def all_gather(self, mine: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        slots = self._views(mine.dtype)
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

        self._stream(-(-max(counts) // width), publish, collect)
        return everything

    def broadcast(self, flat: torch.Tensor, source: int) -> None:
        slots = self._views(flat.dtype)[source]
        chunks = flat.split(slots[0].numel())

        def publish(step: int, slot: int) -> None:
            if self.rank == source:
                slots[slot][: chunks[step].numel()].copy_(chunks[step])

        def collect(step: int, slot: int) -> None:
            if self.rank != source:
                chunks[step].copy_(slots[slot][: chunks[step].numel()])

        self._stream(len(chunks) if flat.numel() else 0, publish, collect)
