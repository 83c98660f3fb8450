"""Messages through shared memory: between every two ranks a few slots, filled and emptied in turn.

A rank works on all its messages at once, as far as each can go: fill a free slot, empty a filled
one. When none can go further it sleeps on its own bell, which every peer rings that has filled or
emptied a slot for it. So no order of messages can lock two ranks up.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

import torch

from farandole.comm.transports.base import Message
from farandole.comm.transports.shm.segment import Semaphores

SLOTS = 4


class Channels:
    """One rank's channels to and from all others. `slots[i]` is the memory of channel slot i."""

    def __init__(
        self, rank: int, size: int, slots: torch.Tensor, semaphores: Semaphores, first: int
    ) -> None:
        self._rank = rank
        self._size = size
        self._slots = slots
        self._semaphores = semaphores
        self._first = first  # of our semaphores: filled, free, bells
        self._sent = [0] * size  # slots ever used, by peer
        self._received = [0] * size

    @staticmethod
    def counts(size: int) -> list[int]:
        """What the semaphores begin with: nothing filled, everything free, no bell rung."""
        return [0] * size**2 + [SLOTS] * size**2 + [0] * size

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        """As `Transport.exchange`."""
        outgoing, incoming = self._chunks(sends), self._chunks(receives)
        bell = self._bell(self._rank)
        last_progress = time.monotonic()
        while outgoing or incoming:
            while self._semaphores.try_wait(bell):
                pass  # from here on a ring means something new
            progress = [self._send(peer, chunks) for peer, chunks in outgoing.items()]
            progress += [self._receive(peer, chunks) for peer, chunks in incoming.items()]
            outgoing = {peer: chunks for peer, chunks in outgoing.items() if chunks}
            incoming = {peer: chunks for peer, chunks in incoming.items() if chunks}
            if any(progress):
                last_progress = time.monotonic()
            elif not self._semaphores.doze(bell):
                self._require_peers([*incoming, *outgoing], last_progress)

    def _require_peers(self, peers: Sequence[int], since: float) -> None:
        for peer in peers:
            lost = self._semaphores.lost(peer, since)
            # One that has ended may have filled what we wait for before; then there is a ring.
            if lost is not None and not self._semaphores.sleep(self._bell(self._rank)):
                raise lost

    def _send(self, peer: int, chunks: deque[torch.Tensor]) -> bool:
        progress = False
        channel = self._rank * self._size + peer
        filled, free = self._first + channel, self._first + self._size**2 + channel
        while chunks and self._semaphores.try_wait(free):
            slot = self._slots[channel, self._sent[peer] % SLOTS]
            chunk = chunks.popleft()
            slot[: len(chunk)].copy_(chunk)
            self._sent[peer] += 1
            self._semaphores.post(filled)
            self._semaphores.post(self._bell(peer))
            progress = True
        return progress

    def _receive(self, peer: int, chunks: deque[torch.Tensor]) -> bool:
        progress = False
        channel = peer * self._size + self._rank
        filled, free = self._first + channel, self._first + self._size**2 + channel
        while chunks and self._semaphores.try_wait(filled):
            slot = self._slots[channel, self._received[peer] % SLOTS]
            chunk = chunks.popleft()
            chunk.copy_(slot[: len(chunk)])
            self._received[peer] += 1
            self._semaphores.post(free)
            self._semaphores.post(self._bell(peer))
            progress = True
        return progress

    def _bell(self, rank: int) -> int:
        return self._first + 2 * self._size**2 + rank

    def _chunks(self, messages: Sequence[Message]) -> dict[int, deque[torch.Tensor]]:
        """What travels slot by slot, for each peer in order."""
        by_peer: dict[int, deque[torch.Tensor]] = {}
        for peer, data in messages:
            raw = data.view(torch.uint8)
            if len(raw):
                by_peer.setdefault(peer, deque()).extend(raw.split(self._slots.shape[-1]))
        return by_peer
