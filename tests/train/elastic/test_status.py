"""What survivors of a loss conclude from how far each had come: the same on all of them."""

from __future__ import annotations

import pytest

from farandole.train.elastic.status import Status, judge


def over(*everyone: Status) -> list[bool]:
    return [judge(own, everyone).is_over for own in everyone]


def test_a_unit_that_some_have_not_done_is_repeated_by_all() -> None:
    assert over(Status(7, "done"), Status(7, "working")) == [False, False]


def test_a_unit_that_all_have_done_is_over() -> None:
    assert over(Status(7, "done"), Status(7, "done")) == [True, True]


def test_those_behind_follow_those_who_came_out_of_the_meeting() -> None:
    """The one ahead is in the next unit, or between two."""
    assert over(Status(8, "working"), Status(7, "done")) == [False, True]
    assert over(Status(7, "over"), Status(7, "done")) == [True, True]


def test_who_is_ahead_says_after_which_unit_data_are_dealt() -> None:
    everyone = [Status(8, "working"), Status(7, "done"), Status(7, "done")]
    assert {judge(own, everyone).top for own in everyone} == {8}


def test_a_dealing_that_was_missed_is_caught_up_with() -> None:
    """The first came out of an earlier recovery, during which another worker was lost."""
    ahead, behind = Status(8, "working", 3, (0, 1, 2)), Status(7, "done", 1, (0, 1, 2, 3))
    assert judge(ahead, [ahead, behind]).missed is None
    assert judge(behind, [ahead, behind]).missed == ahead


def test_what_cannot_be() -> None:
    with pytest.raises(AssertionError, match="units 5 to 7"):
        over(Status(7, "working"), Status(5, "done"))
    with pytest.raises(AssertionError, match="not done here"):
        over(Status(8, "working"), Status(7, "working"))


def test_all_save_after_the_step_after_which_one_of_them_saves() -> None:
    """One has come out of the meeting of step 7, and is in the save that it has heard of there."""
    ahead, behind = Status(8, "working", save_after=7), Status(7, "done", save_after=3)
    verdicts = [judge(own, [ahead, behind]) for own in (ahead, behind)]
    assert [verdict.is_over for verdict in verdicts] == [False, True]
    assert [verdict.save_after for verdict in verdicts] == [7, 7]
