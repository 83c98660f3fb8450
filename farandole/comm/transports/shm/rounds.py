"""Rounds: every rank writes into its own slot, signals, waits for all, and reads their slots.

Claims travel with the first signal of a collective.

**Order.** A slot is written before `signal` and read after `wait`. Both are semaphores, which also
order memory (see segment.py), so what a rank reads is what its owner wrote. There are no flags.

**Which slot.** All ranks count the slots that collectives have taken, in `next_slot`, and so agree
on the next one without a message. The count must move on all ranks or on none. That is why a
collective takes slots only after it knows that all ranks claimed the same: a rank that called
something else has taken none, and the group can still be used.

**When may a slot be written again?** A rank that has seen everybody's signal 1 for chunk i - 2 (it
has, before it publishes chunk i + 1) knows that all have left the turn before that one, and so have
collected chunk i - 4. Five slots would do; there are six. In rounds with one signal, and between
collectives, the distance is shorter.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch

from farandole.comm.transports.claims import (
    CLAIM_BYTES,
    decode_claim,
    encode_claim,
    require_agreement,
)
from farandole.comm.transports.shm.layout import CLAIMS, SLOTS, SegmentLayout
from farandole.comm.transports.shm.segment import Segment, Semaphores


class Rounds:
    """One rank's view of the slots, signals and claims of all ranks."""

    def __init__(
        self, segment: Segment, layout: SegmentLayout, rank: int, semaphores: Semaphores
    ) -> None:
        self.rank = rank
        self.size = size = layout.size
        self.next_slot = 0
        self._memory = segment.memory
        row_bytes = size * CLAIM_BYTES
        begins = [layout.claims + row * row_bytes for row in range(CLAIMS)]
        self._rows = [slice(begin, begin + row_bytes) for begin in begins]
        self._own = [begin + rank * CLAIM_BYTES for begin in begins]
        self._next_row = 0
        self._written = [b""] * CLAIMS  # what this rank has claimed last in each row
        self._agreed = [b""] * CLAIMS  # the row, where all claim that
        slots = segment.bytes[layout.slots : layout.channels]
        self._slots = slots.view(size, SLOTS, layout.slot_bytes)
        self._typed: dict[torch.dtype, list[list[torch.Tensor]]] = {}
        self._semaphores = semaphores
        # By kind of signal: the semaphores to post, and those to wait on with who posts them. Every
        # pair of ranks has its own, so a fast rank's second signal cannot pass for another's first.
        others = [(rank + step) % size for step in range(1, size)]
        address, kinds = semaphores.address, (0, size**2)
        self._signalled = [
            [address(kind + rank * size + peer) for peer in others] for kind in kinds
        ]
        self._awaited = [
            [(address(kind + peer * size + rank), peer) for peer in others] for kind in kinds
        ]

    def signal(self, kind: int) -> None:
        """Tells every other rank that this one has come so far."""
        self._semaphores.post_all(self._signalled[kind])

    def wait(self, kind: int) -> None:
        """Until every other rank has signalled. Raises `PeerLost`."""
        self._semaphores.wait_all(self._awaited[kind])

    def meet(self) -> None:
        """Returns when every rank has called it; what each wrote before, all can read."""
        self._semaphores.post_all(self._signalled[0])
        self._semaphores.wait_all(self._awaited[0])

    def take_slots(self, count: int) -> int:
        """Counts slots as used; the number of the first of them."""
        first = self.next_slot
        self.next_slot += count
        return first

    def views(self, dtype: torch.dtype) -> list[list[torch.Tensor]]:
        """Every slot of every rank as numbers of a kind."""
        if dtype not in self._typed:
            typed = self._slots.view(dtype)
            self._typed[dtype] = [list(of_rank.unbind()) for of_rank in typed.unbind()]
        return self._typed[dtype]

    def stream(
        self, steps: int, publish: Callable[[int, int], None], collect: Callable[[int, int], None]
    ) -> None:
        """Rounds of one signal: publish(step, slot) on every rank, then collect(step, slot).

        A step is published before the one before it is collected, so that waiting for the others
        overlaps with work.
        """
        # Callers have compared claims before, so all ranks take the same number of slots here.
        first = self.take_slots(steps)
        for step in range(steps + 1):
            if step < steps:
                # Slot s is written again SLOTS steps later. By then this rank has waited for
                # everybody's signal of step s + 1 at least, which each rank sends after it has
                # collected step s - 1.
                publish(step, (first + step) % SLOTS)
                self.signal(0)
            if step > 0:
                self.wait(0)
                collect(step - 1, (first + step - 1) % SLOTS)

    # Claims

    def claim(self, claim: str) -> int:
        """Writes down what this rank is about to do; returns where, for `require_same`.

        There are two rows of claims, used in turn. Whoever writes a row for the second time has met
        all ranks since the first, and each came to that meeting after it had read the row.
        """
        row = self._next_row
        self._next_row = (row + 1) % CLAIMS
        frame = encode_claim(claim)
        # What stands there already is not written again: then the others' cores need not fetch it.
        if frame is not self._written[row]:
            self._written[row], self._agreed[row] = frame, frame * self.size
            begin = self._own[row]
            self._memory[begin : begin + CLAIM_BYTES] = frame
        return row

    def claims(self, row: int) -> list[str]:
        """Every rank's claim, after a meeting."""
        frames = self._memory[self._rows[row]]
        ends = range(0, len(frames) + CLAIM_BYTES, CLAIM_BYTES)
        return [decode_claim(frames[begin:end]) for begin, end in itertools.pairwise(ends)]

    def all_same(self, row: int) -> bool:
        """Whether all ranks claim the same, after a meeting."""
        return self._memory[self._rows[row]] == self._agreed[row]

    def require_same(self, row: int) -> None:
        """Raises `DisagreementError` on every rank, or on none: all read the same claims."""
        if not self.all_same(row):
            require_agreement(self.claims(row))
