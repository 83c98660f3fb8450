"""Measures the offset between the clocks of two hosts.

A host asks rank 0 for the time and reads its own clock before and after. Rank 0 read its clock
somewhere in between, so the middle is wrong by at most half of the round trip. Of several answers
the quickest is the best. Ranks of one host share a clock (`CLOCK_MONOTONIC` on Linux), so one of
them asks.

         t0 ─┐ ask               ┌─ t1         offset = theirs − (t0 + t1)/2
    here ────┼───────────────────┼────▶        error ≤ (t1 − t0)/2
    rank 0 ──┴─────── theirs ────┴────▶
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Protocol

import torch
from torch.distributed import DistError, Store

from farandole.topology import Topology

_ROUNDS = 10


class Messages(Protocol):
    """What this asks of a group of ranks; a trace is below the groups, and does not know them."""

    @property
    def rank(self) -> int: ...

    @property
    def topology(self) -> Topology: ...

    def send(self, tensor: torch.Tensor, to: int, /) -> object: ...

    def receive(self, tensor: torch.Tensor, source: int, /) -> torch.Tensor: ...


@dataclass(frozen=True)
class Offset:
    """What to add to this host's clock to get rank 0's, measured when this one read `at`."""

    at: int
    offset_ns: int
    error_ns: int

    def as_line(self) -> dict[str, dict[str, int]]:
        """As it stands in a trace's file."""
        return {"clock": asdict(self)}


def askers(topology: Topology) -> list[int]:
    """The rank that asks on each host that is not rank 0's."""
    return [host.ranks[0] for host in topology.hosts if 0 not in host.ranks]


def offset_over_group(
    group: Messages, now: Callable[[], int] = time.perf_counter_ns
) -> Offset | None:
    """All ranks call it; those that ask get an offset. Raises `CommError` like any collective."""
    stamp = torch.zeros(1, dtype=torch.int64)

    def ask(turn: int) -> int:
        group.send(stamp, 0)
        return int(group.receive(stamp, 0))

    if group.rank == 0:
        for rank in askers(group.topology):
            for _ in range(_ROUNDS):
                group.receive(stamp, rank)
                group.send(stamp.fill_(now()), rank)
    return best_of(ask, now) if group.rank in askers(group.topology) else None


def offset_over_store(
    store: Store,
    rank: int,
    topology: Topology,
    patience: timedelta,
    now: Callable[[], int] = time.perf_counter_ns,
) -> Offset | None:
    """Like `offset_over_group`, at the end of a run, where a rank may have gone already.

    A rank that is not answered in time gets None.
    """
    # One deadline for all rounds: a rank 0 that waits for a dead asker must not wait ten times.
    deadline = time.monotonic() + patience.total_seconds()

    def fetch(key: str) -> bytes:
        left = max(0.001, deadline - time.monotonic())
        store.wait([key], timedelta(seconds=left))
        return bytes(store.get(key))

    def ask(turn: int) -> int:
        store.set(f"ask/{rank}/{turn}", "")
        return int(fetch(f"answer/{rank}/{turn}"))

    try:
        if rank == 0:
            for asker in askers(topology):
                for turn in range(_ROUNDS):
                    fetch(f"ask/{asker}/{turn}")
                    store.set(f"answer/{asker}/{turn}", str(now()))
        return best_of(ask, now) if rank in askers(topology) else None
    except (RuntimeError, DistError):  # not in time, or the store is gone
        return None


def best_of(ask: Callable[[int], int], now: Callable[[], int]) -> Offset:
    """`ask` returns the other clock, read at some time between its beginning and its end."""
    # The least error, not a mean: a round trip that was delayed is delayed on one way only, as a
    # rule, and its middle is off by up to half of the delay. A mean would take that in.
    found = []
    for turn in range(_ROUNDS):
        before = now()
        theirs = ask(turn)
        after = now()
        middle = (before + after) // 2
        found.append(Offset(middle, theirs - middle, (after - before + 1) // 2))
    return min(found, key=lambda offset: offset.error_ns)
