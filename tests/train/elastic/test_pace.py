"""A worker that is much slower than the others is named when it has been for long, and once."""

from __future__ import annotations

from farandole.train.elastic.pace import FOR_SECONDS, Pace


def test_a_straggler_is_named_after_a_minute_and_once() -> None:
    pace = Pace((4, 7, 9))
    found = [(second, pace.note([0.1, 0.4, 0.1], float(second))) for second in range(100)]
    assert [each for each in found if each[1] is not None] == [(int(FOR_SECONDS), 7)]


def test_a_moment_is_no_reason() -> None:
    pace = Pace((0, 1, 2))
    for second in range(200):
        slow = 0.9 if second % 50 == 0 else 0.1
        assert pace.note([0.1, slow, 0.1], float(second)) is None
