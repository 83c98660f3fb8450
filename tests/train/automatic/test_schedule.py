"""When saves come, on a clock of the test's own, and how rarely the ranks meet for that."""

from __future__ import annotations

from dataclasses import dataclass, field

import hypothesis
from hypothesis import strategies as st

from farandole.train.checkpoint.automatic.policy import parse_checkpoints
from farandole.train.checkpoint.automatic.schedule import (
    APART_SECONDS,
    GUESSED_SAVE_SECONDS,
    SaveSchedule,
)


@dataclass
class Played:
    saves: list[tuple[int, float]] = field(default_factory=list)  # steps and time
    meetings: int = 0


def play(policy: str, durations: list[float], *, watches_metric: bool = False) -> Played:
    """Trains with steps that take so long, and saves when it is due."""
    schedule = SaveSchedule(parse_checkpoints(policy), 0.0, 0)
    interval = schedule.interval(3600.0, 0.0)
    played, now, meet_at = Played(), 0.0, 1
    for step, seconds in enumerate(durations, start=1):
        now += seconds
        if step < meet_at:
            continue
        played.meetings += 1
        if schedule.is_due(now, step, interval):
            played.saves.append((step, now))
            schedule.saved(now, step)
        meet_at = step + schedule.places_to_next_meeting(
            step, now, step, interval, watches_metric=watches_metric
        )
    return played


def test_steps_are_exact_and_need_no_further_meetings() -> None:
    played = play("every=50steps", [0.01] * 220)
    assert [step for step, _ in played.saves] == [50, 100, 150, 200]
    assert played.meetings == 1 + 4  # the first place, and where it saves
    watched = play("every=50steps", [0.01] * 220, watches_metric=True)
    assert watched.saves == played.saves


def test_a_time_is_met_within_a_step_and_meetings_are_rare() -> None:
    played = play("every=60s", [0.01] * 60_000)
    assert len(played.saves) == 9
    for (_, before), (_, after) in zip(played.saves, played.saves[1:], strict=False):
        assert 60 <= after - before <= 60 + 0.05
    assert played.meetings < 600 / APART_SECONDS + 9 * 12 + 20  # of 60,000 steps


@hypothesis.given(st.lists(st.floats(0.001, 20.0), min_size=50, max_size=300))
def test_it_never_comes_early_nor_much_too_late(durations: list[float]) -> None:
    played = play("every=30s", durations)
    slowest, last = max(durations) / min(durations), 0.0
    for _, now in played.saves:
        assert now - last >= 30 - 1e-6
        # So many places as had taken 5 s, at the pace of the slowest steps, and one more.
        assert now - last <= 30 + APART_SECONDS * slowest + 2 * max(durations)
        last = now


def test_slower_steps_delay_a_save_by_no_more_than_one_meeting() -> None:
    played = play("every=60s", [0.01] * 5000 + [0.1] * 5000)
    first = played.saves[0][1]
    assert 60 <= first <= 60 + 10 * APART_SECONDS


def test_the_cost_of_a_save_is_measured() -> None:
    schedule = SaveSchedule(parse_checkpoints("every=auto"), 0.0, 0)
    guessed = schedule.interval(3600.0, 0.0)
    assert schedule.save_seconds == GUESSED_SAVE_SECONDS
    schedule.measured(5.0)  # the first, which allocates
    assert schedule.save_seconds == 5.0
    for cost in (0.1, 0.2, 0.3):
        schedule.measured(cost)
    assert abs(schedule.save_seconds - 0.2) < 1e-9
    assert schedule.interval(3600.0, 0.0) < guessed
    assert schedule.interval(3600.0, 500.0) == 500.0  # a save that is written for so long


def test_nothing_is_due_without_a_step() -> None:
    schedule = SaveSchedule(parse_checkpoints("every=1s"), 0.0, 7)
    assert not schedule.is_due(100.0, 7, 1.0)
    assert schedule.is_due(100.0, 8, 1.0)
