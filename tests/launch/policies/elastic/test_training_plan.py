"""Who trains next, on hosts that are lost, fail, or are removed."""

from __future__ import annotations

from farandole.launch.policies.elastic.generations import Member
from farandole.launch.policies.elastic.training_plan import plan_training


def members(*hosts: str, new: int = 0) -> list[Member]:
    """One on each, with ranks in this order; the last ones are `new`."""
    ranked = len(hosts) - new
    return [Member(n, host, n if n < ranked else None) for n, host in enumerate(hosts)]


def test_others_take_the_place_of_a_host_that_is_left_out() -> None:
    hosts = {"a": 2, "b": 2, "c": 2}
    plan = plan_training(hosts, members("a", "a"), left_out=["b"], max_workers=4)
    assert plan.starting == {"c": 2}
    plan = plan_training(hosts, members("a", "a", "b"), left_out=["b"], max_workers=4)
    assert plan.starting == {"c": 1}
    assert not plan.leaving  # it runs there


def test_workers_of_a_removed_host_leave() -> None:
    plan = plan_training({"a": 1, "c": 1}, members("a", "b"), max_workers=2)
    assert [member.worker for member in plan.leaving] == [1]
    assert plan.starting == {"c": 1}


def test_they_stay_as_long_as_too_few_would_be_left() -> None:
    before = members("a", "b", "b", "c", new=1)
    plan = plan_training({"a": 1, "c": 2}, before, min_workers=2, max_workers=4)
    assert [member.worker for member in plan.leaving] == [2]
    assert plan.starting == {"c": 1}
    plan = plan_training({"a": 1, "c": 2}, before, ready={3}, min_workers=2, max_workers=4)
    assert [member.worker for member in plan.leaving] == [1, 2]


def test_one_with_the_state_stays_until_others_have_it() -> None:
    """All hosts are replaced at once."""
    plan = plan_training({"c": 2}, members("a", "a"), max_workers=2)
    assert [member.worker for member in plan.leaving] == [1]
    assert plan.starting == {"c": 1}
    plan = plan_training({"c": 2}, members("a", "c", new=1), ready={1}, max_workers=2)
    assert not plan.leaving
    plan = plan_training({"c": 2}, members("a", "c"), max_workers=2)
    assert [member.worker for member in plan.leaving] == [0]
    assert plan.starting == {"c": 1}
