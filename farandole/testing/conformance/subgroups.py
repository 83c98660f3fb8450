"""Groups of some of the ranks."""

from __future__ import annotations

import functools

import torch

from farandole.comm import Group
from farandole.errors import UserError
from farandole.testing.conformance.material import made, reduced, require_equal, require_error


def check_disjoint_subgroups_at_once(group: Group) -> None:
    ranks = list(range(group.rank % 2, group.size, 2))
    half = group.subgroup(ranks)
    assert (half.rank, half.size) == (ranks.index(group.rank), len(ranks))
    for turn in range(5):  # the halves do different things, and not at the same pace
        parts = [made(rank, (50,), salt=turn) for rank in ranks]
        for _ in range(1 + ranks[0] * turn):
            mine = half.all_reduce(parts[half.rank].clone())
            require_equal(mine, reduced(parts, "sum"), f"a sum over ranks {ranks}")
        assert half.gather_json(group.rank) == ranks
        if ranks[0]:
            half.barrier()
    require_equal(group.all_reduce(torch.ones(1)), torch.tensor([float(group.size)]), "all again")


def check_subgroups_in_another_order(group: Group) -> None:
    ranks = list(reversed(range(group.size)))
    turned = group.subgroup(ranks)
    assert turned.rank == ranks.index(group.rank)
    assert turned.gather_json(group.rank) == ranks
    first = turned.broadcast(torch.tensor([group.rank]), source=0)
    require_equal(first, torch.tensor([group.size - 1]), "what the last, now first, has sent")
    rows = turned.reduce_scatter(torch.arange(group.size))
    require_equal(rows, torch.tensor([turned.rank * group.size]), "its row")


def check_subgroups_of_subgroups(group: Group) -> None:
    """Down to one rank, each time without the first."""
    inner, ranks = group, list(range(group.size))
    while inner.size > 1:
        if inner.rank == 0:
            break
        ranks = ranks[1:]
        inner = inner.subgroup(list(range(1, inner.size)))
        assert inner.gather_json(group.rank) == ranks
        for algorithm in ("auto", "ring"):
            total = inner.all_reduce(torch.tensor([1 << group.rank]), algorithm=algorithm)
            require_equal(total, torch.tensor([sum(1 << rank for rank in ranks)]), f"of {ranks}")
    group.barrier()


def check_groups_of_the_same_ranks_do_not_mix(group: Group) -> None:
    everyone = list(range(group.size))
    one, other = group.subgroup(everyone), group.subgroup(everyone)
    pending = [one.start(one.all_reduce, torch.full((1000,), 2.0)) for _ in range(5)]
    for _ in range(5):
        mine = other.all_reduce(torch.full((1000,), 3.0), algorithm="ring")
        require_equal(mine, torch.full((1000,), 3.0 * group.size), "the other group")
        assert group.gather_json(group.rank) == everyone
    for handle in pending:
        require_equal(handle.wait(), torch.full((1000,), 2.0 * group.size), "the one group")


def check_a_subgroup_comes_after_what_was_started(group: Group) -> None:
    handles = [group.start(group.all_reduce, torch.ones(1000)) for _ in range(5)]
    same = group.subgroup(list(range(group.size)))
    assert same.gather_json(group.rank) == list(range(group.size))
    for handle in handles:
        require_equal(handle.wait(), torch.full((1000,), float(group.size)), "a sum before it")


def check_waits_and_bytes_count_in_the_whole(group: Group) -> None:
    before = group.meter.bytes_sent
    group.subgroup(list(range(group.size))).all_gather(torch.zeros(10))
    assert group.meter.bytes_sent == before + 40 * (group.size - 1)


def check_what_is_no_subgroup_is_refused(group: Group) -> None:
    others = [rank for rank in range(group.size) if rank != group.rank]
    for ranks in (others, [group.rank, group.rank], [group.rank, group.size]):
        require_error(UserError, functools.partial(group.subgroup, ranks), f"of ranks {ranks}")


CHECKS = (
    check_disjoint_subgroups_at_once,
    check_subgroups_in_another_order,
    check_subgroups_of_subgroups,
    check_groups_of_the_same_ranks_do_not_mix,
    check_a_subgroup_comes_after_what_was_started,
    check_waits_and_bytes_count_in_the_whole,
    check_what_is_no_subgroup_is_refused,
)
