"""Slots of shared memory, one at a time: the fastest way for a small message between two ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from farandole.comm.transports.shm.channels import SLOTS, Channels


class Frame(NamedTuple):
    """A slot that the peer has filled, as bytes and as a tensor of bytes."""

    memory: memoryview
    tensor: torch.Tensor


class Frames:
    """The slots between this rank and one peer, one at a time, for whoever knows what is in them.

    For messages that fit into a slot: no list of messages, no bell, and the one who waits waits for
    this peer alone. Larger ones go by `exchange`, which may take turns with this.
    """

    def __init__(self, channels: Channels, peer: int) -> None:
        self._channels = channels
        self._peer = peer
        self._out = channels.rank * channels.size + peer
        self._in = peer * channels.size + channels.rank
        self._filled, self._free = channels.filled(self._in), channels.free(self._in)
        self._theirs_filled = channels.filled(self._out)
        self._theirs_free = channels.free(self._out)
        slots = channels.slots
        self.slot_bytes = slots.shape[-1]
        self._tensors = {
            channel: list(slots[channel].unbind()) for channel in (self._out, self._in)
        }
        self._memory = {
            channel: [_memory(slot) for slot in tensors]
            for channel, tensors in self._tensors.items()
        }

    def has_room(self, more: Sequence[int]) -> bool:
        """Whether a frame, and messages of so many bytes after it, find free slots now."""
        wanted = 1 + sum(-(-size // self.slot_bytes) for size in more)
        # Only this rank takes from the semaphore of its free slots. So the number that it reads
        # here can grow until it sends, but not shrink.
        return wanted <= SLOTS and self._channels.semaphores.value(self._theirs_free) >= wanted

    def put(self, head: bytes, parts: Sequence[tuple[int, torch.Tensor]]) -> None:
        """Fills the next slot: `head` at its beginning, each flat tensor where it is said to be."""
        channels = self._channels
        channels.semaphores.wait(self._theirs_free, self._peer)
        index = channels.sent[self._peer] % SLOTS
        self._memory[self._out][index][: len(head)] = head
        slot = self._tensors[self._out][index]
        for begin, flat in parts:
            slot[begin : begin + flat.nbytes].copy_(flat.view(torch.uint8))
        # No bell is rung: the receiver of a frame waits for `filled` itself. It cannot be inside
        # `exchange`, because a message that needs `exchange` begins with a frame.
        channels.sent[self._peer] += 1
        channels.semaphores.post(self._theirs_filled)

    def get(self) -> Frame:
        """The next slot that the peer has filled. It is this rank's until `done`."""
        channels = self._channels
        channels.semaphores.wait(self._filled, self._peer)
        index = channels.received[self._peer] % SLOTS
        return Frame(self._memory[self._in][index], self._tensors[self._in][index])

    def done(self) -> None:
        channels = self._channels
        channels.received[self._peer] += 1
        channels.semaphores.post(self._free)
        channels.semaphores.post(channels.bell(self._peer))  # it may be waiting for room


def _memory(slot: torch.Tensor) -> memoryview:
    return memoryview(slot.numpy())  # type: ignore[arg-type]
