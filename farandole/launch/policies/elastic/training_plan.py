"""Who is to be in the next generation of a training: the decision, without a process or a socket.

`plan_generation` says who has room. Beyond that:

- a host that is left out, because it was lost or fails, gets no new workers. Those that run there
  stay, and other hosts are used in its place;
- workers of a host that was removed stay as long as the job needs them: fewer than the least number
  would be left, or nobody who has the state.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from farandole.launch.policies.elastic.generations import (
    GenerationPlan,
    Member,
    plan_generation,
)


def plan_training(
    hosts: Mapping[str, int],
    members: Sequence[Member],
    *,
    left_out: Collection[str] = (),
    ready: Collection[int] = (),
    min_workers: int = 1,
    max_workers: int | None = None,
) -> GenerationPlan:
    """`ready` are the new workers that can join at once."""
    there = Counter(member.host for member in members)
    room = {
        host: min(slots, there[host]) if host in left_out else slots
        for host, slots in hosts.items()
    }
    plan = plan_generation(room, members, max_workers)
    kept = _needed(plan, ready, min_workers)
    if not kept:
        return plan
    staying = Counter(member.host for member in plan.staying)
    for member in kept:
        staying[member.host] += 1
        room[member.host] = max(room.get(member.host, 0), staying[member.host])
    return plan_generation(room, members, max_workers)


def _needed(plan: GenerationPlan, ready: Collection[int], min_workers: int) -> list[Member]:
    """Those of the leaving ones without whom the job could not go on now, by rank."""
    survivors = [member for member in plan.staying if member.rank is not None]
    joining = [member for member in plan.staying if member.rank is None and member.worker in ready]
    missing = min_workers - len(survivors) - len(joining)
    if not survivors:
        missing = max(missing, 1)
    leaving = [member for member in plan.leaving if member.rank is not None]
    leaving.sort(key=lambda member: member.rank or 0)
    return leaving[: max(missing, 0)]
