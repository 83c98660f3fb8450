"""DASO's clockwork: phases by progress, and the period by plateaus."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from farandole.sync import Daso
from farandole.sync.daso.cycle import Cycle


def periods(daso: Daso, losses: list[float]) -> list[tuple[int, int]]:
    cycle = Cycle(daso.rule)
    found = []
    for loss in losses:
        cycle.epoch(loss)
        found.append((cycle.period, cycle.wait))
    return found


def test_a_loss_that_falls_leaves_the_period_alone() -> None:
    assert periods(Daso(), [2.0, 1.5, 1.0, 0.5]) == [(4, 1)] * 4


def test_plateaus_halve_the_period_and_then_start_again_at_the_longest() -> None:
    daso = Daso(patience=2)
    flat = [1.0] * 9
    assert periods(daso, flat) == [
        (4, 1),  # the first is an improvement over nothing
        (4, 1), (2, 1),
        (2, 1), (1, 1),
        (1, 1), (8, 2),
        (8, 2), (4, 1),
    ]  # fmt: skip


def test_less_than_5_per_cent_is_no_improvement() -> None:
    assert periods(Daso(patience=1), [1.0, 0.96]) == [(4, 1), (2, 1)]
    assert periods(Daso(patience=1), [1.0, 0.94]) == [(4, 1), (4, 1)]


def test_small_improvements_add_up() -> None:
    """Each is compared with the best, not with the epoch before."""
    assert periods(Daso(), [1.0, 0.97, 0.94, 0.91])[-1] == (4, 1)


def test_the_wait_can_be_fixed() -> None:
    assert periods(Daso(wait=3, patience=1), [1.0, 1.0]) == [(4, 3), (2, 3)]


def test_phases_follow_the_progress() -> None:
    cycle = Cycle(Daso(warmup=0.2, cooldown=0.1).rule)
    assert [cycle.phase(p, 1) for p in (0.0, 0.19)] == ["warm-up"] * 2
    assert [cycle.phase(p, 1) for p in (0.2, 0.5, 0.89)] == ["cycling"] * 3
    assert cycle.phase(0.9, 9) == "cool-down"


def test_where_nobody_knows_the_end_the_first_pass_warms_up() -> None:
    cycle = Cycle(Daso().rule)
    assert [cycle.phase(None, passes) for passes in (1, 2, 50)] == ["warm-up", "cycling", "cycling"]
    assert Cycle(Daso(warmup=0.0).rule).phase(None, 1) == "cycling"


@given(
    losses=st.lists(st.floats(0.01, 10), max_size=60),
    every=st.integers(1, 20),
    longest=st.integers(1, 20),
    patience=st.integers(1, 4),
)
def test_the_period_stays_in_bounds_and_survives_a_resume(
    losses: list[float], every: int, longest: int, patience: int
) -> None:
    rule = Daso(every=every, longest=longest, patience=patience).rule
    cycle, resumed = Cycle(rule), Cycle(rule)
    for loss in losses:
        cycle.epoch(loss)
        assert 1 <= cycle.period <= max(every, longest)
        assert 1 <= cycle.wait <= max(1, cycle.period // 4)
        fresh = Cycle(rule)
        fresh.load_state_dict(resumed.state_dict())
        fresh.epoch(loss)
        resumed = fresh
        assert (resumed.period, resumed.wait) == (cycle.period, cycle.wait)
