"""Where things lie in the segment that the ranks of a host share."""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass
from datetime import timedelta

import torch

from farandole.comm.transports.claims import CLAIM_BYTES
from farandole.comm.transports.shm import channels
from farandole.comm.transports.shm.segment import SEMAPHORE_BYTES, Peers, Segment, Semaphores

SLOTS = 6  # of each rank; why six: see rounds.py
SLOT_BYTES = 2**21
CLAIMS = 2  # a rank may write its next claim while the others still read the last
_CHANNEL_BYTES = 2**17
_WIDE_CHANNEL_BYTES = 2**19
_SMALL_SLOT_BYTES = 2**12
_TOKEN_BYTES = 16


@dataclass(frozen=True)
class SegmentLayout:
    """Where things lie in the segment."""

    size: int
    slot_bytes: int = SLOT_BYTES
    messages_only: bool = False  # then what is for collectives is small, and channels are wide

    # The parts follow each other: semaphores, claims, slots, channels, token, statements. All but
    # the last two have lengths that are multiples of 64 bytes, so that slots can be read as numbers
    # of any dtype and no two semaphores share a cache line.
    @property
    def semaphores(self) -> list[int]:
        """What each begins with: two kinds of signal between every two ranks, then the channels."""
        return [0] * (2 * self.size**2) + channels.Channels.counts(self.size)

    @property
    def claims(self) -> int:
        return len(self.semaphores) * SEMAPHORE_BYTES

    @property
    def slots(self) -> int:
        return self.claims + CLAIMS * self.size * CLAIM_BYTES

    @property
    def channels(self) -> int:
        """Set aside only when used: most ranks never talk to most others."""
        return self.slots + self.size * SLOTS * self.slot_bytes

    @property
    def channel_bytes(self) -> int:
        if self.messages_only:
            return _WIDE_CHANNEL_BYTES
        return _CHANNEL_BYTES if self.size <= 16 else _CHANNEL_BYTES // 8

    @classmethod
    def for_messages(cls, size: int) -> SegmentLayout:
        return cls(size, _SMALL_SLOT_BYTES, messages_only=True)

    @property
    def token(self) -> int:
        return self.channels + self.size**2 * channels.SLOTS * self.channel_bytes

    @property
    def statements(self) -> int:
        return self.token + _TOKEN_BYTES

    @property
    def length(self) -> int:
        return self.statements + self.size**2


def make(layout: SegmentLayout, timeout: timedelta) -> tuple[Segment, str]:
    """A segment with everything in its first state, and the token that tells it from others."""
    segment = Segment.make(layout.length, committed=layout.channels)
    # No other rank knows of the segment yet: `share_segment` tells them afterwards, over another
    # transport. So these writes need no order among themselves.
    nobody = Peers([os.getpid()], 0)
    Semaphores(segment, 0, nobody, timeout, spin=False).initialise(layout.semaphores)
    token = secrets.token_bytes(_TOKEN_BYTES)
    segment.bytes[layout.token : layout.statements] = torch.frombuffer(
        bytearray(token), dtype=torch.uint8
    )
    return segment, token.hex()
