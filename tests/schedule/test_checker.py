"""The checker lets no broken schedule through, and says where it breaks."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farandole.schedule import (
    ALGORITHMS,
    Round,
    Schedule,
    ScheduleError,
    Transfer,
    build,
    check,
    ring_all_gather,
    ring_reduce_scatter,
)
from farandole.topology import Topology

Rounds = list[list[Transfer]]
UNEVEN_HOSTS = Topology.from_names(["a", "b", "a", "a", "b"])


def schedule_of(rounds: Rounds, like: Schedule) -> Schedule:
    packed = tuple(Round.from_transfers(transfers) for transfers in rounds)
    return Schedule("changed", like.ranks, like.chunks, packed, like.collective)


def made(*rounds: list[Transfer], ranks: int = 2, chunks: int = 1) -> Schedule:
    return Schedule("mine", ranks, chunks, tuple(Round.from_transfers(turn) for turn in rounds))


def lists(schedule: Schedule) -> Rounds:
    return [list(turn) for turn in schedule.rounds]


def is_right_in_any_order(schedule: Schedule, order: random.Random) -> bool:
    """Plays the all-reduce with numbers, in place, the transfers of a round in a random order.

    Rank r contributes a power of a base so large that its digit says how often it is in a sum.
    """
    base = 10**40
    everyone = sum(base**rank for rank in range(schedule.ranks))
    held = [[base**rank] * schedule.chunks for rank in range(schedule.ranks)]
    for transfers in lists(schedule):
        for src, dst, first, stop, op in order.sample(transfers, len(transfers)):
            for chunk in range(first, stop):
                kept = held[dst][chunk] if op == "add" else 0
                held[dst][chunk] = kept + held[src][chunk]
    return all(value == everyone for chunks in held for value in chunks)


def each_transfer(rounds: Rounds) -> Iterator[tuple[int, int]]:
    return ((turn, at) for turn, transfers in enumerate(rounds) for at in range(len(transfers)))


@pytest.mark.parametrize("name", ALGORITHMS)
def test_no_transfer_can_be_left_out_doubled_or_change_its_op(name: str) -> None:
    """Exhaustively: all of these break every algorithm, and the checker notices each one."""
    good = build(name, 5, UNEVEN_HOSTS)
    check(schedule_of(lists(good), good))
    tried = 0
    for turn, at in each_transfer(lists(good)):
        transfer = lists(good)[turn][at]
        other = transfer._replace(op="copy" if transfer.op == "add" else "add")
        for instead in ([], [transfer, transfer], [other]):
            rounds = lists(good)
            rounds[turn][at : at + 1] = instead
            with pytest.raises(ScheduleError):
                check(schedule_of(rounds, good))
            tried += 1
    assert tried == 3 * sum(len(turn) for turn in good.rounds) > 0


@pytest.mark.parametrize("name", ALGORITHMS)
def test_rounds_in_the_wrong_order_are_noticed(name: str) -> None:
    good = build(name, 5, UNEVEN_HOSTS)
    noticed = 0
    for early, late in itertools.combinations(range(len(good.rounds)), 2):
        rounds = lists(good)
        rounds[early], rounds[late] = rounds[late], rounds[early]
        changed = schedule_of(rounds, good)
        if not is_right_in_any_order(changed, random.Random(0)):
            noticed += 1
            with pytest.raises(ScheduleError):
                check(changed)
    assert noticed > 0


@st.composite
def changed_schedules(draw: st.DrawFn) -> Schedule:
    """A right schedule after one to three random changes."""
    ranks = draw(st.integers(2, 7))
    names = draw(st.lists(st.sampled_from("abc"), min_size=ranks, max_size=ranks))
    good = build(draw(st.sampled_from(sorted(ALGORITHMS))), ranks, Topology.from_names(names))
    rounds = lists(good)
    for _ in range(draw(st.integers(1, 3))):
        turn = draw(st.sampled_from([i for i, transfers in enumerate(rounds) if transfers]))
        at = draw(st.integers(0, len(rounds[turn]) - 1))
        elsewhere = draw(st.integers(0, len(rounds) - 1))
        transfer = rounds[turn][at]
        match draw(st.sampled_from(["drop", "double", "op", "swap", "move", "turn", "to", "run"])):
            case "drop":
                del rounds[turn][at]
            case "double":
                rounds[elsewhere].append(transfer)
            case "op":
                rounds[turn][at] = transfer._replace(op=draw(st.sampled_from(["add", "copy"])))
            case "swap":
                rounds[turn], rounds[elsewhere] = rounds[elsewhere], rounds[turn]
            case "move":
                rounds[elsewhere].append(rounds[turn].pop(at))
            case "turn":
                rounds[turn][at] = transfer._replace(src=transfer.dst, dst=transfer.src)
            case "to":
                rounds[turn][at] = transfer._replace(dst=draw(st.integers(0, ranks - 1)))
            case "run":
                first = draw(st.integers(0, good.chunks - 1))
                stop = draw(st.integers(first + 1, good.chunks))
                rounds[turn][at] = transfer._replace(first=first, stop=stop)
        if not any(rounds):
            break
    return schedule_of(rounds, good)


@settings(max_examples=300, deadline=None)
@given(changed_schedules(), st.randoms(use_true_random=False))
def test_what_the_checker_accepts_is_right_in_any_order(
    schedule: Schedule, order: random.Random
) -> None:
    try:
        check(schedule)
    except ScheduleError:
        return
    assert is_right_in_any_order(schedule, order)


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (
            made([Transfer(0, 1, 0, 1, "add")], [Transfer(2, 0, 0, 1, "copy")]),
            r"mine, round 1: 2→0 =0 names a rank outside 0 … 1\.",
        ),
        (made([Transfer(1, 1, 0, 1, "add")]), r"round 0: 1→1 \+0 sends from a rank to itself"),
        (
            made([Transfer(0, 1, 2, 4, "add")], chunks=3),
            r"round 0: 0→1 \+2-3 carries no run of the chunks 0 … 2",
        ),
        (made([Transfer(0, 1, 1, 1, "add")], chunks=3), "carries no run of the chunks"),
        (
            made([Transfer(0, 1, 0, 1, "add"), Transfer(1, 0, 0, 1, "add")]),
            "round 0: rank [01] sends chunk 0 while it also receives it",
        ),
        (
            made([Transfer(0, 2, 0, 1, "copy"), Transfer(1, 2, 0, 1, "copy")], ranks=3),
            r"round 0: rank 2 gets a copy of chunk 0 while something else arrives there; "
            r"senders: \[0, 1\]",
        ),
        (
            made([Transfer(0, 2, 0, 1, "copy"), Transfer(1, 2, 0, 1, "add")], ranks=3),
            "rank 2 gets a copy of chunk 0 while something else arrives",
        ),
        (
            made([Transfer(0, 1, 0, 2, "add")], [Transfer(0, 1, 1, 2, "add")], chunks=2),
            r"round 1: rank 1 has rank 0's contribution to chunk 1 2 times after adding what came "
            r"from rank\(s\) \[0\]",
        ),
        (
            made([Transfer(0, 1, 0, 1, "add")]),
            "after all 1 rounds: rank 0 lacks rank 1's contribution to chunk 0",
        ),
        (
            made(
                [Transfer(2, 0, 0, 1, "add"), Transfer(3, 1, 0, 1, "add")],
                [Transfer(0, 2, 0, 1, "copy"), Transfer(1, 3, 0, 1, "copy")],
                [Transfer(2, 1, 0, 1, "add"), Transfer(3, 0, 0, 1, "add")],
                [Transfer(0, 2, 0, 1, "copy"), Transfer(1, 3, 0, 1, "copy")],
                ranks=4,
            ),
            "ranks 0 and 1 summed chunk 0 each for itself and may differ in the last bits",
        ),
    ],
)
def test_errors_name_the_round_the_ranks_and_the_chunk(schedule: Schedule, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        check(schedule)


def test_each_half_of_the_ring_must_keep_its_own_promise() -> None:
    scatter, gather = ring_reduce_scatter(4), ring_all_gather(4)
    check(scatter)
    check(gather)
    with pytest.raises(ScheduleError, match="rank 0 lacks"):
        check(Schedule("half", 4, 4, scatter.rounds, "all_reduce"))
    with pytest.raises(ScheduleError, match="rank 0 should not have rank 0's contribution"):
        check(Schedule("half", 4, 4, gather.rounds[:-1], "all_gather"))
    with pytest.raises(ScheduleError, match="lacks"):
        check(Schedule("half", 4, 4, scatter.rounds[1:], "reduce_scatter"))
    added = [[transfer._replace(op="add") for transfer in turn] for turn in lists(gather)]
    with pytest.raises(ScheduleError, match="should not have"):
        check(schedule_of(added, gather))
