"""Who is slow, and what follows from it."""

from __future__ import annotations

import pytest

from farandole.learn.pools.pace import Paces


def one_slow() -> Paces:
    paces = Paces()
    for worker, seconds in (("a", 0.01), ("b", 0.011), ("slow", 0.1)):
        paces.note(worker, seconds, 0.01)
    return paces


@pytest.mark.parametrize(("left", "leaves"), [(0, True), (3, True), (12, True), (30, False)])
def test_a_slow_worker_leaves_the_last_pieces_to_the_others(left: int, leaves: bool) -> None:
    # Two others are through with 12 pieces, and those they have begun, after 7 of their turns.
    assert one_slow().leaves("slow", {"a", "b"}, left) == leaves


def test_others_take_every_piece() -> None:
    paces = one_slow()
    assert not paces.leaves("a", {"b", "slow"}, 0)
    assert not paces.leaves("b", {"a"}, 0)  # not so much slower
    assert not paces.leaves("slow", set(), 5)  # nobody else is at work
    assert not paces.leaves("new", {"a"}, 0)


def test_the_piece_of_a_slow_worker_is_overtaken_before_it_is_late() -> None:
    paces = one_slow()
    assert paces.would_overtake("a", "slow", 0.0, 0.01)
    assert not paces.would_overtake("a", "slow", 0.09, 0.01)  # nearly done
    assert not paces.would_overtake("slow", "a", 0.0, 0.01)
    assert not paces.would_overtake("a", "b", 0.0, 0.01)


def test_a_pace_is_of_the_last_piece() -> None:
    paces = one_slow()
    paces.note_at_least("a", 0.2, 0.01)
    assert paces.of("a") == pytest.approx(20)
    paces.note_at_least("a", 0.05, 0.01)  # it runs still
    assert paces.of("a") == pytest.approx(20)
    paces.note("a", 0.01, 0.01)
    assert paces.of("a") == pytest.approx(1)
    paces.forget("slow")
    assert paces.of("slow") == 1


def test_very_short_pieces_say_nothing() -> None:
    paces = Paces()
    paces.note("a", 0.001, 0.00001)
    paces.note_at_least("b", 0.001, 0.00001)
    assert paces.of("a") == paces.of("b") == 1
    assert not one_slow().would_overtake("a", "slow", 0.0, 0.00001)
