"""A meeting ends when all who live have given, and everyone gets everything."""

from __future__ import annotations

from farandole.server.registrar.meetings import Meetings


def test_it_is_over_when_all_have_given():
    meetings = Meetings()
    meetings.give("loss", 0, b"a")
    assert meetings.complete([0, 1]) == []
    assert meetings.missing("loss", [0, 1, 2]) == [1, 2]
    meetings.give("loss", 1, b"b")
    assert meetings.complete([0, 1]) == [("loss", {0: b"a", 1: b"b"})]
    assert meetings.complete([0, 1]) == []  # and is over once


def test_what_one_gave_before_it_died_counts():
    meetings = Meetings()
    meetings.give("loss", 0, b"a")
    meetings.give("loss", 2, b"c")
    assert meetings.complete([0, 1]) == []
    assert meetings.complete([0]) == [("loss", {0: b"a", 2: b"c"})]


def test_one_who_comes_meanwhile_is_waited_for():
    meetings = Meetings()
    meetings.give("loss", 0, b"a")
    assert meetings.complete([0, 1]) == []
    meetings.give("loss", 1, b"b")
    assert meetings.complete([0, 1, 2]) == []
    assert meetings.missing("loss", [0, 1, 2]) == [2]


def test_names_are_apart():
    meetings = Meetings()
    meetings.give("/1", 0, b"1")
    meetings.give("/2", 1, b"2")
    assert meetings.complete([0, 1]) == []
    meetings.give("/2", 0, b"3")
    meetings.give("/1", 1, b"4")
    found = dict(meetings.complete([0, 1]))
    assert found == {"/1": {0: b"1", 1: b"4"}, "/2": {1: b"2", 0: b"3"}}


def test_one_who_comes_again_hears_what_was_said():
    meetings = Meetings()
    for name in ("/1", "first/1", "second/1"):
        assert meetings.give(name, 0, b"a") is None
        assert meetings.give(name, 1, b"b") is None
        assert len(meetings.complete([0, 1])) == 1
        assert meetings.give(name, 1, b"later") == {0: b"a", 1: b"b"}
    meetings.forget_all_but("second")
    assert meetings.give("/1", 1, b"later") == {0: b"a", 1: b"b"}
    assert meetings.give("second/1", 1, b"later") == {0: b"a", 1: b"b"}
    assert meetings.give("first/1", 1, b"later") is None


def test_nothing_is_missing_from_what_nobody_holds_but_everybody():
    assert Meetings().missing("never", [1, 0]) == [0, 1]
