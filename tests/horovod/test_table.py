"""The table of who has asked for what: alike on all ranks, whatever the order."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farandole.horovod.engine.requests import (
    ADD_SET,
    ALLGATHER,
    ALLREDUCE,
    ALLTOALL,
    BARRIER,
    BROADCAST,
    REDUCESCATTER,
    Request,
)
from farandole.horovod.engine.table import NOTHING, Announcement, Response, Table, problem_with

DTYPES = ("float32", "float64", "int64", "bool")


def reduce(name: str = "x", **changes: object) -> Request:
    request = Request(name, ALLREDUCE, ("float32",), ((4,),), op="sum")
    return request._replace(**changes)  # type: ignore[arg-type]


def one_round(*said: Announcement, fusion_bytes: int = 1 << 20) -> tuple[Response, ...]:
    return Table(len(said), fusion_bytes).hear(said).responses


def asks(*requests: Request) -> Announcement:
    return Announcement(requests)


# Whatever the order

REDUCTIONS = st.builds(
    lambda op, dtypes, numel, scale: (op, dtypes, tuple((numel,) for _ in dtypes), scale),
    st.sampled_from(["sum", "average", "adasum"]),
    st.lists(st.sampled_from(DTYPES), min_size=1, max_size=3).map(tuple),
    st.integers(0, 40),
    st.sampled_from([1.0, 0.5]),
)


@settings(max_examples=60)
@given(st.data())
def test_every_name_is_decided_once_and_alike(data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 4), label="ranks")
    fusion_bytes = data.draw(st.sampled_from([0, 64, 256, 1 << 20]), label="fusion_bytes")
    drawn = data.draw(st.lists(REDUCTIONS, min_size=1, max_size=8))
    wanted = [
        Request(f"t{i}", ALLREDUCE, dtypes, shapes, op, prescale=scale)
        for i, (op, dtypes, shapes, scale) in enumerate(drawn)
    ]
    # Each rank: its own order, cut into rounds at its own places.
    queues = [list(data.draw(st.permutations(wanted))) for _ in range(size)]
    tables = [Table(size, fusion_bytes) for _ in range(size)]
    told: list[set[str]] = [set() for _ in range(size)]
    decided: list[str] = []
    while any(queues):
        said = []
        for rank, queue in enumerate(queues):
            count = len(queue) - data.draw(st.integers(0, len(queue)))
            now, queues[rank] = queue[:count], queue[count:]
            told[rank] |= {request.name for request in now}
            said.append(Announcement(tuple(now)))
        decisions = [table.hear(said) for table in tables]
        assert all(decision == decisions[0] for decision in decisions)
        assert decisions[0].is_news == any(one.requests for one in said)
        for response in decisions[0].responses:
            assert not response.error
            names = [item.name for item in response.items]
            assert all(set(names) <= each for each in told), "not all have asked yet"
            decided += names
            check_fusion(response, fusion_bytes)
    assert sorted(decided) == sorted(request.name for request in wanted)
    assert all(table.overdue(float("inf")) == [] for table in tables)


def check_fusion(response: Response, fusion_bytes: int) -> None:
    likes = [item.like for item in response.items]
    assert len({(r.op, r.prescale, r.postscale, r.device) for r in likes}) == 1
    if len(likes) > 1:
        assert len({dtype for request in likes for dtype in request.dtypes}) == 1
        assert sum(request.nbytes for request in likes) <= fusion_bytes


def test_small_ones_of_a_kind_are_done_together() -> None:
    requests = [reduce(name) for name in "abc"]
    other = reduce("d", dtypes=("float64",))
    said = asks(requests[0], other, requests[1], requests[2])
    fused = [[item.name for item in r.items] for r in one_round(said, said, fusion_bytes=32)]
    assert fused == [["a", "b"], ["d"], ["c"]]
    assert len(one_round(said, said, fusion_bytes=0)) == 4


def test_only_reductions_are_done_together() -> None:
    moved = [Request(n, BROADCAST, ("int8",), ((2,),), root=0) for n in "ab"]
    assert [len(r.items) for r in one_round(asks(*moved), asks(*moved))] == [1, 1]


def test_nothing_said_is_no_news() -> None:
    assert not Table(2, 64).hear([NOTHING, NOTHING]).is_news


# Those who have joined


@settings(max_examples=40)
@given(st.data())
def test_ranks_that_join_are_not_waited_for(data: st.DataObject) -> None:
    """Ranks have each its own number of batches; all get through, and all hear who was last."""
    size = data.draw(st.integers(2, 4))
    batches = [data.draw(st.integers(0, 4)) for _ in range(size)]
    joins_at = {rank: count + data.draw(st.integers(0, 2)) for rank, count in enumerate(batches)}
    table = Table(size, 0)
    done: dict[str, list[int]] = {}
    last = None
    for turn in range(max(joins_at.values()) + 1):
        said = [
            Announcement(
                (reduce(f"batch{turn}"),) if turn < batches[rank] else (),
                joins=turn == joins_at[rank],
            )
            for rank in range(size)
        ]
        decision = table.hear(said)
        for response in decision.responses:
            assert not response.error
            (item,) = response.items
            assert item.name not in done
            done[item.name] = [rank for rank, r in enumerate(item.requests) if r is not None]
        if decision.last_joined is not None:
            assert turn == max(joins_at.values())
            last = decision.last_joined
    assert done == {
        f"batch{turn}": [rank for rank in range(size) if turn < batches[rank]]
        for turn in range(max(batches))
    }
    assert last in [rank for rank in range(size) if joins_at[rank] == max(joins_at.values())]
    assert table.joined == []  # and everything begins anew


def test_what_a_joined_rank_had_asked_for_is_still_its_own() -> None:
    table = Table(2, 64)
    assert table.hear([asks(reduce()), NOTHING]).responses == ()
    assert table.hear([Announcement(joins=True), NOTHING]).responses == ()
    (response,) = table.hear([NOTHING, asks(reduce())]).responses
    assert response.items[0].requests == (reduce(), reduce())


NEEDS_ALL = {
    "broadcast": Request("b", BROADCAST, ("int8",), ((1,),), root=1),
    "broadcast from one who is there": Request("b", BROADCAST, ("int8",), ((1,),), root=0),
    "allgather": Request("g", ALLGATHER, ("int8",), ((1,),)),
    "alltoall": Request("t", ALLTOALL, ("int8",), ((2,),), splits=(1, 1)),
    "reducescatter": Request("r", REDUCESCATTER, ("int8",), ((2,),), op="sum"),
    "Adasum": reduce(op="adasum"),
    "barrier": Request("m", BARRIER),
    "add_process_set": Request("s", ADD_SET, splits=(0,)),
}


@pytest.mark.parametrize("what", NEEDS_ALL)
def test_what_cannot_be_done_without_those_who_joined(what: str) -> None:
    (response,) = one_round(asks(NEEDS_ALL[what]), Announcement(joins=True))
    kind = what.split()[0]
    assert f"{kind} needs every rank, and rank 1 has joined" in response.error


def test_a_sum_is_done_without_those_who_joined() -> None:
    (response,) = one_round(asks(reduce()), Announcement(joins=True), Announcement(joins=True))
    assert not response.error
    asked = asks(NEEDS_ALL["allgather"])
    (response,) = one_round(asked, Announcement(joins=True), Announcement(joins=True))
    assert "ranks 1, 2 have joined" in response.error


# What does not fit together

GATHER = Request("x", ALLGATHER, ("float32",), ((4, 2),))
SEND = Request("x", ALLTOALL, ("float32",), ((4, 2),), splits=(2, 2))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (reduce(), reduce(shapes=((5,),))),
        (reduce(), reduce(dtypes=("float64",))),
        (reduce(), reduce(op="average")),
        (reduce(), reduce(prescale=2.0)),
        (reduce(), reduce(postscale=2.0)),
        (reduce(), reduce(device="cuda")),
        (reduce(), reduce(dtypes=("float32",) * 2, shapes=((4,), (4,)))),
        (reduce(), reduce(kind=REDUCESCATTER)),
        (reduce(kind=REDUCESCATTER), reduce(kind=REDUCESCATTER, shapes=((5,),))),
        (reduce(kind=BROADCAST, root=0), reduce(kind=BROADCAST, root=1)),
        (reduce(kind=BROADCAST, root=0), reduce(kind=BROADCAST, root=0, shapes=((5,),))),
        (GATHER, GATHER._replace(shapes=((4, 3),))),
        (GATHER, GATHER._replace(shapes=((4,),))),
        (GATHER, GATHER._replace(shapes=((4, 2), (4, 2)), dtypes=("float32",) * 2)),
        (GATHER, GATHER._replace(dtypes=("int64",))),
        (SEND, SEND._replace(shapes=((4, 3),))),
        (SEND, GATHER),
        (Request("s", ADD_SET, splits=(0, 1)), Request("s", ADD_SET, splits=(0, 2))),
    ],
)
def test_a_mismatch_names_two_ranks_and_what_they_want(one: Request, other: Request) -> None:
    (response,) = one_round(asks(one), asks(one), asks(other))
    assert f"rank 0 for {one}, rank 2 for {other}" in response.error
    assert repr(one.name) in response.error
    assert str(one) != str(other)


@pytest.mark.parametrize("request_", [GATHER, SEND])
def test_rows_may_differ_where_they_are_moved(request_: Request) -> None:
    fewer = request_._replace(shapes=((1, 2),), splits=(1, 0) if request_.splits else ())
    (response,) = one_round(asks(request_), asks(fewer))
    assert not response.error
    assert response.items[0].requests == (request_, fewer)


def test_one_mismatch_does_not_spoil_the_rest() -> None:
    good, bad = reduce("good"), reduce("bad")
    responses = one_round(asks(bad, good), asks(good, bad._replace(op="max")))
    assert {r.items[0].name: bool(r.error) for r in responses} == {"bad": True, "good": False}
    assert problem_with(next(r for r in responses if not r.error).items[0]) == ""


def test_the_ranks_of_a_set_are_called_by_their_numbers_among_all() -> None:
    table = Table(2, 64, [3, 7])
    (response,) = table.hear([asks(reduce()), asks(reduce(op="max"))], now=1.0).responses
    assert "rank 3 for " in response.error
    assert "rank 7 for " in response.error
    decision = table.hear([asks(reduce("y")), Announcement(leaves="is tired")], now=1.0)
    assert decision.leaving == ((7, "is tired"),)
    assert table.overdue(2.0) == [("y", [3], [7])]


# Leaving, and what is overdue


def test_who_leaves_is_told_to_all() -> None:
    decision = Table(3, 64).hear([NOTHING, Announcement(leaves="is tired"), NOTHING])
    assert decision.leaving == ((1, "is tired"),)


def test_what_is_overdue_says_who_is_missing() -> None:
    table = Table(3, 64)
    table.hear([asks(reduce("a")), NOTHING, NOTHING], now=1.0)
    table.hear([NOTHING, asks(reduce("a")), asks(reduce("b"))], now=5.0)
    assert table.overdue(1.0) == []
    assert table.overdue(2.0) == [("a", [0, 1], [2])]
    assert table.overdue(6.0) == [("a", [0, 1], [2]), ("b", [2], [0, 1])]
    table.hear([Announcement(joins=True), NOTHING, NOTHING], now=6.0)
    assert table.overdue(6.0)[1] == ("b", [2], [1])  # who has joined is not missing
