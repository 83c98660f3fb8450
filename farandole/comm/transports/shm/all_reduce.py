"""All-reduce in shared memory: in one round, chunk by chunk, or in place in registered memory.

A small all-reduce is one round: each rank adds up everybody's slot, in rank order. A large one goes
chunk by chunk, in a pipeline:

    chunk             0          1          2
    1. publish     ─ write ─▶ ─ write ─▶                what other ranks own goes into my slot
    2. reduce              ─ add, write ─▶ ─ add, …     what I own: mine and theirs, into my slot
    3. collect                          ─ read ─▶       what they own, from their slots

so that a rank publishes chunk i + 1 before it waits for chunk i, and one wait is hidden behind the
other ranks' work. Each element is added up by one rank, in rank order, and copied by the others:
all get the same bits, the same every time, wherever the element stands in the vector.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch

from farandole.comm.arithmetic import Op
from farandole.comm.kernels import Kernels, for_short
from farandole.comm.transports.base import Transport
from farandole.comm.transports.shm.chunks import Chunks
from farandole.comm.transports.shm.in_place import OwnedPieces
from farandole.comm.transports.shm.layout import SLOTS
from farandole.comm.transports.shm.registered import register
from farandole.comm.transports.shm.rounds import Rounds

_SMALL_BYTES = 2**20  # divided by the ranks: up to there one round, in which all add up all, pays
_IN_PLACE_BYTES = 2**16  # registered memory: up to there
_KEPT_VIEWS = 64


class SharedMemoryAllReduce:
    """One rank's all-reduces, and the memory that was registered for them."""

    def __init__(self, rounds: Rounds, slot_bytes: int, *, ranks_take_turns: bool) -> None:
        self._rounds = rounds
        # Where ranks must take turns on the cores, a round takes longer.
        small_bytes = (2 * _SMALL_BYTES if ranks_take_turns else _SMALL_BYTES) // rounds.size
        self._small_bytes = min(small_bytes, slot_bytes)
        self._in_place_bytes = min(_IN_PLACE_BYTES, self._small_bytes)
        self._parts: dict[tuple[torch.dtype, int], tuple[Kernels, list[list[Any]]]] = {}
        self._registered: dict[int, OwnedPieces] = {}  # by the address of the storage
        self._warned = False

    def run(self, flat: torch.Tensor, op: Op, claim: str | None) -> None:
        rounds = self._rounds
        claim = claim or "all_reduce of what is known to agree"
        if flat.nbytes <= self._in_place_bytes:
            self._at_once(flat, op, rounds.claim(claim))
            return
        pieces = self._registered.get(flat.untyped_storage().data_ptr())
        if pieces is not None:
            # The claim names the registration, so that a rank whose tensor is not registered is
            # found out. It would read slots while the others write into each other's tensors.
            row = rounds.claim(f"{claim} registered at {flat.storage_offset()}")
            self._in_place(flat, op, row, pieces)
        elif flat.nbytes <= self._small_bytes:
            self._at_once(flat, op, rounds.claim(claim))
        else:
            self._by_chunks(flat, op, rounds.claim(claim))

    def goes_with_claim(self, source: torch.Tensor) -> bool:
        """Whether `if_agreed` can take it: it fits into one round."""
        return source.nbytes <= self._small_bytes

    def if_agreed(self, claim: str, source: torch.Tensor, into: torch.Tensor, op: Op) -> list[str]:
        """As `Transport.reduce_if_agreed`. What is small travels with the claim, in one round."""
        rounds = self._rounds
        row = rounds.claim(claim)
        # Taken only if all agree: a rank that merely shares its claim takes none.
        kernels, slots = self._parts_of(source)
        parts = slots[rounds.next_slot % SLOTS]
        kernels.copy(parts[rounds.rank], kernels.of(source))
        rounds.meet()
        if not rounds.all_same(row):
            return rounds.claims(row)
        rounds.take_slots(1)
        kernels.reduce(kernels.of(into), parts, op)
        return [claim] * rounds.size

    def register(
        self, tensor: torch.Tensor, transport: Transport, pids: Sequence[int]
    ) -> AbstractContextManager[object]:
        """Reduces `tensor` in place from now on, until the context ends, where there is memory."""
        if tensor.nbytes <= self._in_place_bytes:
            return nullcontext()  # these are faster through a slot
        try:
            found = register(tensor, transport, pids)
        except OSError as error:
            if transport.rank == 0 and not self._warned:
                warnings.warn(
                    f"{error}, so gradients are copied once more on their way. In a container give "
                    "/dev/shm more room: docker run --shm-size=4g.",
                    stacklevel=3,
                )
            self._warned = True
            return nullcontext()
        self._registered[found.address] = OwnedPieces(found, transport.rank)
        forget = ExitStack()
        forget.callback(self._registered.pop, found.address, None)
        return forget

    def _at_once(self, flat: torch.Tensor, op: Op, row: int) -> None:
        rounds = self._rounds
        kernels, slots = self._parts_of(flat)
        parts, vector = slots[rounds.next_slot % SLOTS], kernels.of(flat)
        # One meeting is enough. A rank that comes to the next meeting has read this slot to its
        # end, and the next collective writes another slot.
        kernels.copy(parts[rounds.rank], vector)
        rounds.meet()
        rounds.require_same(row)
        rounds.take_slots(1)  # only now: whoever called something else has taken none
        kernels.reduce(vector, parts, op)

    def _parts_of(self, flat: torch.Tensor) -> tuple[Kernels, list[list[Any]]]:
        """For each slot, room for `flat` on every rank. To make views takes time."""
        key = flat.dtype, flat.numel()
        if key not in self._parts:
            if len(self._parts) >= _KEPT_VIEWS:
                self._parts.clear()
            kernels = for_short(flat.dtype, flat.nbytes)
            slots = zip(*self._rounds.views(flat.dtype), strict=True)
            self._parts[key] = (
                kernels,
                [[kernels.of(of_rank[: flat.numel()]) for of_rank in slot] for slot in slots],
            )
        return self._parts[key]

    def _in_place(self, flat: torch.Tensor, op: Op, row: int, pieces: OwnedPieces) -> None:
        """Each rank reduces the piece that it owns, in everybody's memory.

        Between the two meetings nobody touches its own tensor. Each byte has one writer, its owner.
        """
        rounds = self._rounds
        mine = pieces.of(flat)
        try:
            rounds.meet()
            if rounds.all_same(row):
                # The first meeting ends all writes of the scripts to their tensors, the second one
                # all writes of owners. Between the two a byte is touched only by its owner.
                mine.reduce(op)
                rounds.signal(1)
                rounds.wait(1)
                return
        except BaseException:
            # This rank goes on without the others. One that comes late would still write its piece
            # into this rank's tensor, in the middle of whatever the script does next.
            pieces.take_back()
            raise
        rounds.require_same(row)

    def _by_chunks(self, flat: torch.Tensor, op: Op, row: int) -> None:
        rounds = self._rounds
        chunks = Chunks(flat, rounds.views(flat.dtype), rounds.rank)
        first = rounds.next_slot
        chunks.publish(0, first)
        rounds.meet()
        rounds.require_same(row)  # before anything depends on the length
        rounds.take_slots(len(chunks))
        # Two kinds of signal are needed: a fast rank posts 0 for chunk i + 1 before it posts 1 for
        # chunk i. With one kind, a rank that waits for the second could take the first for it, and
        # collect a chunk that is not reduced yet.
        for index in range(len(chunks)):
            if index + 1 < len(chunks):
                chunks.publish(index + 1, first + index + 1)
                rounds.signal(0)
            if index > 0:
                rounds.wait(0)
            chunks.reduce(index, first + index, op)
            rounds.signal(1)
            if index > 0:
                rounds.wait(1)
                chunks.collect(index - 1, first + index - 1)
        rounds.wait(1)
        chunks.collect(len(chunks) - 1, first + len(chunks) - 1)
