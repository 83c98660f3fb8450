"""What a schedule puts on each rank: messages, bytes, and how many talk to it at once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from farandole.errors import UserError
from farandole.schedule.pieces import piece_bounds
from farandole.schedule.rounds import Schedule

Counts = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Facts:
    """Figures of a schedule on a vector of some length; the arrays have an entry per rank.

    A message is counted even where the vector is so short that its chunks are empty.
    """

    rounds: int
    messages_sent: Counts
    messages_received: Counts
    bytes_sent: Counts
    bytes_received: Counts
    max_fan_in: int  # messages that one rank receives in one round
    max_fan_out: int

    @classmethod
    def of(cls, schedule: Schedule, length_bytes: int) -> Facts:
        bounds = byte_bounds(schedule, length_bytes)
        sent, received = np.zeros((2, 2, schedule.ranks), dtype=np.int64)
        fan_out = fan_in = 0
        for turn in schedule.rounds:
            size = bounds[turn.stop] - bounds[turn.first]
            out, into = (tally(end, size, schedule.ranks) for end in (turn.src, turn.dst))
            sent += out
            received += into
            fan_out = max(fan_out, int(out[0].max()))
            fan_in = max(fan_in, int(into[0].max()))
        rounds = len(schedule.rounds)
        return cls(rounds, sent[0], received[0], sent[1], received[1], fan_in, fan_out)


def byte_bounds(schedule: Schedule, length_bytes: int) -> Counts:
    """Where each chunk of a vector of `length_bytes` begins, and where the last one ends."""
    if length_bytes < 0:
        raise UserError(f"{schedule.name}: a vector of {length_bytes} bytes; give 0 or more.")
    return piece_bounds(schedule.chunks, length_bytes)


def tally(end: npt.NDArray[np.integer], size: Counts, places: int) -> Counts:
    """Messages (first row) and bytes (second) of transfers, by the place at one of their ends."""
    messages = np.bincount(end, minlength=places)
    # bincount weighs in float64, which is exact up to 2⁵³ bytes.
    total = np.bincount(end, weights=size, minlength=places).astype(np.int64)
    return np.stack([messages, total])
