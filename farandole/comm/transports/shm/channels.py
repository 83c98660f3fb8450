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

from farandole.comm.transports.messages import Message
from farandole.comm.transports.shm.segment import Semaphores

SLOTS = 4


class Channels:
    """One rank's channels to and from all others. `slots[i]` is the memory of channel slot i."""

    def __init__(
        self, rank: int, size: int, slots: torch.Tensor, semaphores: Semaphores, first: int
    ) -> None:
        self.rank = rank
        self.size = size
        self.slots = slots
        self.semaphores = semaphores
        self.first = first  # of our semaphores: filled, free, bells
        # Slots ever used, by peer. Modulo SLOTS they are both ends' place in the ring of slots:
        # nobody needs to say which slot comes next, as long as both count every slot once.
        self.sent = [0] * size
        self.received = [0] * size

    @staticmethod
    def counts(size: int) -> list[int]:
        """What the semaphores begin with: nothing filled, everything free, no bell rung."""
        return [0] * size**2 + [SLOTS] * size**2 + [0] * size

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        """As `Transport.exchange`."""
        outgoing, incoming = self._chunks(sends), self._chunks(receives)
        bell = self.bell(self.rank)
        last_progress = time.monotonic()
        while outgoing or incoming:
            while self.semaphores.try_wait(bell):
                pass  # drained before looking: a ring from here on means something new
            progress = [self._send(peer, chunks) for peer, chunks in outgoing.items()]
            progress += [self._receive(peer, chunks) for peer, chunks in incoming.items()]
            outgoing = {peer: chunks for peer, chunks in outgoing.items() if chunks}
            incoming = {peer: chunks for peer, chunks in incoming.items() if chunks}
            if any(progress):
                last_progress = time.monotonic()
            elif not self.semaphores.doze(bell):
                self._require_peers([*incoming, *outgoing], last_progress)

    def _require_peers(self, peers: Sequence[int], since: float) -> None:
        for peer in peers:
            lost = self.semaphores.lost(peer, since)
            # A peer that has ended may have filled what we wait for before. It rang after that, so
            # look at the bell once more after having seen that the peer is gone.
            if lost is not None and not self.semaphores.sleep(self.bell(self.rank)):
                raise lost

    def _send(self, peer: int, chunks: deque[torch.Tensor]) -> bool:
        progress = False
        channel = self.rank * self.size + peer
        filled, free = self.filled(channel), self.free(channel)
        while chunks and self.semaphores.try_wait(free):
            slot = self.slots[channel, self.sent[peer] % SLOTS]
            chunk = chunks.popleft()
            slot[: len(chunk)].copy_(chunk)
            self.sent[peer] += 1
            # The bell rings after `filled` is posted. A peer that the bell wakes must find the
            # slot, because it will not look again before the next ring.
            self.semaphores.post(filled)
            self.semaphores.post(self.bell(peer))
            progress = True
        return progress

    def _receive(self, peer: int, chunks: deque[torch.Tensor]) -> bool:
        progress = False
        channel = peer * self.size + self.rank
        filled, free = self.filled(channel), self.free(channel)
        while chunks and self.semaphores.try_wait(filled):
            slot = self.slots[channel, self.received[peer] % SLOTS]
            chunk = chunks.popleft()
            chunk.copy_(slot[: len(chunk)])
            self.received[peer] += 1
            self.semaphores.post(free)
            self.semaphores.post(self.bell(peer))
            progress = True
        return progress

    # Each channel has two semaphores, and together they always count SLOTS slots but for those that
    # an end is working on. The sender takes `free`, writes, and posts `filled`; the receiver takes
    # `filled`, reads, and posts `free`. So a slot has one owner at any time, and the post after the
    # write (or the read) is what makes it visible to the next owner.

    def filled(self, channel: int) -> int:
        """The semaphore that counts the channel's slots that are ready to be read."""
        return self.first + channel

    def free(self, channel: int) -> int:
        """The semaphore that counts the channel's slots that may be written."""
        return self.first + self.size**2 + channel

    def bell(self, rank: int) -> int:
        """The semaphore on which `rank` sleeps when none of its messages can go further."""
        return self.first + 2 * self.size**2 + rank

    def _chunks(self, messages: Sequence[Message]) -> dict[int, deque[torch.Tensor]]:
        """What travels slot by slot, for each peer in order."""
        by_peer: dict[int, deque[torch.Tensor]] = {}
        for peer, data in messages:
            raw = data.view(torch.uint8)
            # Both ends know all lengths and skip an empty message, so neither waits for it.
            if len(raw):
                by_peer.setdefault(peer, deque()).extend(raw.split(self.slots.shape[-1]))
        return by_peer
