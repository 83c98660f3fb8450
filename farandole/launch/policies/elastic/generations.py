"""Which worker gets which rank next: the decision, without a process or a socket.

A generation is a set of workers that train together. When a worker dies, or hosts come and go, the
next one is formed:

    hosts now      A:2  C:2                       B was removed, C is new
    last time      rank 0 on A, 1 on A, 2 on B    rank 0 has died
    next time      rank 0 on A (it was 1), 1 on A (new), 2 and 3 on C (new); the one on B leaves

Those that were there keep their order, and one of them is rank 0, because state is sent from rank
0. The ranks of a host follow one another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Member:
    """A worker that runs. `rank` is the one it has in the generation that ends; None: it is new."""

    worker: int
    host: str
    rank: int | None = None


@dataclass(frozen=True)
class GenerationPlan:
    """What is to be done before the next generation can begin."""

    staying: tuple[Member, ...]  # in the order of their next ranks
    leaving: tuple[Member, ...]
    starting: Mapping[str, int]  # how many more workers to start on which hosts

    @property
    def size(self) -> int:
        """How many workers there are once the new ones have started."""
        return len(self.staying) + sum(self.starting.values())


@dataclass(frozen=True)
class GenerationPlacement:
    """One worker's rank in a generation."""

    worker: int
    rank: int
    size: int
    local_rank: int
    local_size: int


def plan_generation(
    hosts: Mapping[str, int], members: Sequence[Member], max_workers: int | None
) -> GenerationPlan:
    """`hosts` says how many workers each may have. Who is there stays before anyone new starts."""
    room = dict(hosts)
    left = sum(hosts.values()) if max_workers is None else max_workers
    staying, leaving = [], []
    # Whoever has the state comes first. So as long as there is room for one such worker, rank 0 of
    # the next generation has the state.
    for member in sorted(members, key=_seniority):
        if left and room.get(member.host, 0):
            room[member.host] -= 1
            left -= 1
            staying.append(member)
        else:
            leaving.append(member)
    homes = dict.fromkeys(member.host for member in staying if member.rank is not None)
    order = list(dict.fromkeys([*homes, *hosts]))
    starting = {}
    for host in order:
        more = min(room[host], left)
        if more:
            starting[host] = more
            left -= more
    # Stable: on each host those that stay come first, in their old order, then the new.
    staying.sort(key=lambda member: order.index(member.host))
    return GenerationPlan(tuple(staying), tuple(leaving), starting)


def assign_ranks(staying: Sequence[Member]) -> list[GenerationPlacement]:
    """The ranks of those that stay, in their order, when nobody is to be started any more."""
    found: list[GenerationPlacement] = []
    on_host: dict[str, int] = {}
    for member in staying:
        on_host[member.host] = on_host.get(member.host, 0) + 1
    seen: dict[str, int] = {}
    for rank, member in enumerate(staying):
        local = seen.get(member.host, 0)
        seen[member.host] = local + 1
        found.append(
            GenerationPlacement(member.worker, rank, len(staying), local, on_host[member.host])
        )
    return found


def _seniority(member: Member) -> tuple[bool, int, int]:
    return (member.rank is None, member.rank or 0, member.worker)
