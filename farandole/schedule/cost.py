"""How long a schedule takes by the α–β model: α seconds for each message, β for each byte.

A rank sends one message at a time and receives one at a time, both at once. A round ends when its
busiest rank is done; the rounds follow one another. Arithmetic is free.

With a topology there are two kinds of link. Ranks of a host share its one link to the other hosts:
whoever uses it in a round waits until everything that the host sends (or receives) is through.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from farandole.errors import UserError
from farandole.schedule.facts import Counts, byte_bounds, tally
from farandole.schedule.rounds import Round, Schedule
from farandole.topology import Topology


@dataclass(frozen=True)
class Link:
    """α and β."""

    seconds_per_message: float
    seconds_per_byte: float


def cost_seconds(
    schedule: Schedule,
    length_bytes: int,
    link: Link,
    *,
    across: Link | None = None,
    topology: Topology | None = None,
) -> float:
    """Seconds for a vector of `length_bytes`.

    Without a topology every pair of ranks has a `link`; with one, the ranks of a host do, and
    `across` is what each host has to all others.
    """
    if (across is None) != (topology is None):
        raise UserError("cost_seconds: give both `across` and `topology`, or neither.")
    if topology is not None and topology.size != schedule.ranks:
        raise UserError(
            f"{schedule.name} is for {schedule.ranks} ranks, the topology holds {topology.size}."
        )
    # Without a topology all ranks share a host, and nothing goes across.
    host = np.zeros(schedule.ranks, dtype=np.int64)
    for index, members in enumerate(topology.hosts if topology is not None else ()):
        host[list(members.ranks)] = index
    bounds = byte_bounds(schedule, length_bytes)
    return sum(
        _round_seconds(turn, bounds[turn.stop] - bounds[turn.first], host, link, across or link)
        for turn in schedule.rounds
    )


def _round_seconds(turn: Round, size: Counts, host: Counts, inside: Link, across: Link) -> float:
    """The time of the rank that is busy longest, with sending or with receiving."""
    leaves = host[turn.src] != host[turn.dst]
    seconds = 0.0
    for end in (turn.src, turn.dst):
        messages, total = tally(end[~leaves], size[~leaves], len(host))
        busy = messages * inside.seconds_per_message + total * inside.seconds_per_byte
        if leaves.any():
            messages, total = tally(end[leaves], size[leaves], len(host))
            # A host's link is shared: each of its ranks that uses it waits for the bytes of all of
            # them.
            through_the_link = np.bincount(host, weights=total)[host]
            busy += messages * across.seconds_per_message
            busy += np.where(messages > 0, through_the_link, 0) * across.seconds_per_byte
        seconds = max(seconds, float(busy.max()))
    return seconds
