"""Who is blamed, when everybody waits for somebody."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import HashStore, PrefixStore

from farandole.comm import failure_evidence as witness
from farandole.comm.failure_evidence import StoreBoard, trail_ends, who_is_missing
from farandole.comm.transports.shm.segment import Statements

RANKS = st.integers(0, 7)


@pytest.mark.parametrize(
    ("start", "statements", "ends"),
    [
        (0, {0: [3]}, [3]),
        (0, {0: [3], 3: [2]}, [2]),  # a ring: 3 is not to blame, it waits itself
        (0, {0: [3], 3: [2], 2: [1]}, [1]),
        (0, {0: [1, 2, 3], 2: [1], 3: [1]}, [1]),
        (0, {0: [1, 2], 3: [2]}, [1, 2]),
        (0, {0: [1], 1: [0]}, []),  # a circle
        (0, {}, []),
    ],
)
def test_the_trail_ends_at_those_who_say_nothing(
    start: int, statements: dict[int, list[int]], ends: list[int]
) -> None:
    assert trail_ends(start, statements) == ends


@given(st.dictionaries(RANKS, st.lists(RANKS)), RANKS)
def test_whoever_has_spoken_is_never_blamed(statements: dict[int, list[int]], start: int) -> None:
    ends = trail_ends(start, statements)
    assert ends == sorted(set(ends))
    assert not set(ends) & {*statements, start}
    assert set(ends) <= {rank for waited_for in statements.values() for rank in waited_for}


@given(st.integers(2, 8), st.data())
def test_one_missing_rank_in_a_ring_is_found_by_all(size: int, data: st.DataObject) -> None:
    missing = data.draw(st.integers(0, size - 1))
    statements = {rank: [(rank - 1) % size] for rank in range(size) if rank != missing}
    for rank in statements:
        assert trail_ends(rank, statements) == [missing]


def test_a_store_as_the_board(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(witness, "_GRACE_SECONDS", 0.1)
    store = HashStore()
    boards = [StoreBoard(store, rank, 3) for rank in range(3)]
    assert boards[0].read() == {}
    assert who_is_missing(boards[2], 2, [1]) == [1]
    assert who_is_missing(boards[0], 0, [2]) == [1]  # 2 has said that it waits for 1
    assert boards[1].read() == {0: [2], 2: [1]}
    assert StoreBoard(PrefixStore("other group", store), 0, 3).read() == {}


def test_in_a_circle_one_names_those_it_waited_for() -> None:
    store = HashStore()
    StoreBoard(store, 1, 2).write([0])
    assert who_is_missing(StoreBoard(store, 0, 2), 0, [1]) == [1]


def test_shared_memory_as_the_board() -> None:
    memory = torch.zeros(3, 3, dtype=torch.uint8)
    zero, two = Statements(memory, 0), Statements(memory, 2)
    assert not zero.any()
    zero.write([1, 2])
    two.write([1])
    assert zero.any()
    assert zero.read() == two.read() == {0: [1, 2], 2: [1]}


class Counting:
    """A board that can be read only so often."""

    def __init__(self, reads: int) -> None:
        self.reads = reads

    def write(self, waited_for: object) -> None:
        pass

    def read(self) -> dict[int, list[int]]:
        if not self.reads:
            raise RuntimeError("gone")
        self.reads -= 1
        return {0: [1], 1: [2]}


def test_those_who_have_ended_are_given_no_more_time() -> None:
    board = Counting(reads=1)
    assert who_is_missing(board, 0, [1], has_ended=lambda rank: rank == 2) == [2]
    assert board.reads == 0


def test_without_a_board_one_names_what_one_knows() -> None:
    assert who_is_missing(Counting(reads=0), 0, [1]) == [1]
    assert who_is_missing(Counting(reads=3), 0, [1]) == [2]


def test_who_has_said_that_it_leaves_is_blamed_at_once() -> None:
    store = HashStore()
    boards = [StoreBoard(store, rank, 3) for rank in range(3)]
    assert who_is_missing(boards[0], 0, [0]) == [0]
    assert who_is_missing(boards[1], 1, [2]) == [0]  # who may be waiting for 0, and is not asked
