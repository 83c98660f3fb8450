"""Who sits where in the next generation."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from farandole.launch.policies.elastic.generations import Member, assign_ranks, plan_generation

HOSTS = st.sampled_from(["a", "b", "c", "d"])
SLOTS = st.dictionaries(HOSTS, st.integers(1, 3), max_size=4)
LIMITS = st.none() | st.integers(1, 8)


def grow(hosts: dict[str, int], members: list[Member], limit: int | None) -> list[Member]:
    """The next generation, when everyone who is to be started has been, in the order of ranks."""
    plan = plan_generation(hosts, members, limit)
    number = max((member.worker for member in members), default=-1) + 1
    there = list(plan.staying)
    for host, count in plan.starting.items():
        for _ in range(count):
            there.append(Member(number, host))
            number += 1
    second = plan_generation(hosts, there, limit)
    assert not second.starting
    assert not second.leaving
    assert len(second.staying) == plan.size
    return list(second.staying)


@settings(max_examples=150)
@given(st.lists(st.tuples(SLOTS, st.sets(st.integers(0, 11))), min_size=1, max_size=4), LIMITS)
def test_over_any_generations(
    steps: list[tuple[dict[str, int], set[int]]], limit: int | None
) -> None:
    """Hosts change as they like, and after each generation the workers of some ranks die."""
    members: list[Member] = []
    for hosts, dying in steps:
        survivors = [member for member in members if member.rank is not None]
        members = grow(hosts, members, limit)
        placements = assign_ranks(members)
        assert [placement.rank for placement in placements] == list(range(len(members)))
        assert {placement.size for placement in placements} <= {len(members)}
        assert len(members) == min(sum(hosts.values()), limit or 99)
        on_host = [member.host for member in members]
        for host in set(on_host):
            first = on_host.index(host)
            there = on_host.count(host)
            assert there <= hosts[host]
            assert on_host[first : first + there] == [host] * there
            assert [placement.local_rank for placement in placements[first : first + there]] == [
                *range(there)
            ]
            assert {placement.local_size for placement in placements[first : first + there]} == {
                there
            }
        kept = [member.rank for member in members if member.rank is not None]
        assert kept == sorted(kept)
        if kept:
            assert members[0].rank is not None  # rank 0 has state
        # Nobody goes while there is room on its host.
        for survivor in survivors:
            if survivor not in members:
                assert on_host.count(survivor.host) == min(
                    hosts.get(survivor.host, 0), len(members)
                )
                assert all(
                    member.rank is not None and member.rank < (survivor.rank or 0)
                    for member in members
                    if member.host == survivor.host
                )
        members = [
            Member(placement.worker, member.host, placement.rank)
            for placement, member in zip(placements, members, strict=True)
            if placement.rank not in dying
        ]


def test_the_example_of_the_module() -> None:
    members = [Member(1, "A", 1), Member(2, "B", 2)]
    plan = plan_generation({"A": 2, "C": 2}, members, None)
    assert plan.leaving == (Member(2, "B", 2),)
    assert plan.starting == {"A": 1, "C": 2}
    there = [*plan.staying, Member(3, "A"), Member(4, "C"), Member(5, "C")]
    staying = plan_generation({"A": 2, "C": 2}, there, None).staying
    assert [(member.worker, member.host) for member in staying] == [
        (1, "A"),
        (3, "A"),
        (4, "C"),
        (5, "C"),
    ]


def test_who_is_there_has_precedence_over_who_is_new_where_the_room_is_short() -> None:
    members = [Member(4, "b", 0), Member(7, "a")]
    plan = plan_generation({"a": 3, "b": 3}, members, 3)
    assert plan.staying == (Member(4, "b", 0), Member(7, "a"))
    assert plan.starting == {"b": 1}
