"""The chosen interval: the shape of the formula, and how near it is to a simulated optimum."""

from __future__ import annotations

import math
import random

import hypothesis
import pytest
from hypothesis import strategies as st

from farandole.train.checkpoint.automatic.young_daly import best_interval, daly, young

COSTS = st.floats(1e-3, 1e4)
TIMES = st.floats(1.0, 1e7)


@hypothesis.given(COSTS, TIMES, st.floats(1.01, 100.0))
def test_it_grows_with_the_time_between_failures(cost: float, mtbf: float, factor: float) -> None:
    assert young(cost, mtbf * factor) > young(cost, mtbf)
    on_one_branch = cost < 2 * mtbf or cost >= 2 * mtbf * factor
    if on_one_branch:
        assert daly(cost, mtbf * factor) > daly(cost, mtbf)


@hypothesis.given(TIMES)
def test_where_daly_s_branches_meet_it_jumps_by_a_ninth(mtbf: float) -> None:
    """So it is not monotone there: where a save takes twice the time between failures."""
    edge = 2 * mtbf
    assert daly(edge, mtbf) == mtbf
    assert math.isclose(daly(edge * (1 - 1e-9), mtbf), mtbf * 8 / 9, rel_tol=1e-6)


@hypothesis.given(COSTS, TIMES, st.floats(1.01, 100.0))
def test_costlier_saves_are_rarer(cost: float, mtbf: float, factor: float) -> None:
    hypothesis.assume(cost * factor < mtbf)
    least = 1e-9
    cheap = best_interval(cost, mtbf, least=least)
    assert best_interval(cost * factor, mtbf, least=least) > cheap


@hypothesis.given(COSTS, TIMES)
def test_its_bounds(cost: float, mtbf: float) -> None:
    interval = daly(cost, mtbf)
    assert 0 < interval <= mtbf * (1 + 1e-9)
    if cost < 2 * mtbf:
        # Daly's terms are a correction of Young's: between it less a save and a half more.
        assert young(cost, mtbf) - cost <= interval <= 1.5 * young(cost, mtbf)
    else:
        assert interval == mtbf


@hypothesis.given(TIMES)
def test_for_cheap_saves_it_is_youngs(mtbf: float) -> None:
    cost = mtbf * 1e-8
    assert math.isclose(daly(cost, mtbf), young(cost, mtbf), rel_tol=1e-3)


@hypothesis.given(COSTS, TIMES, TIMES)
def test_one_save_is_under_way_at_a_time(cost: float, mtbf: float, write: float) -> None:
    assert best_interval(cost, mtbf, write) >= write


def simulated(work: float, interval: float, cost: float, mtbf: float, seed: int) -> float:
    """Seconds to do `work` seconds of training, with failures at random times."""
    draws = random.Random(seed)
    clock = done = 0.0
    failure = draws.expovariate(1 / mtbf)
    while done < work:
        piece = min(interval, work - done)
        if clock + piece + cost <= failure:
            clock, done = clock + piece + cost, done + piece
        else:  # what was done since the last save is lost
            clock = failure
            failure += draws.expovariate(1 / mtbf)
    return clock


@pytest.mark.parametrize(("cost", "mtbf"), [(1.0, 1000.0), (10.0, 600.0), (60.0, 300.0)])
def test_it_is_near_the_optimum_of_a_simulation(cost: float, mtbf: float) -> None:
    work = 60 * mtbf

    def mean(interval: float) -> float:
        return sum(simulated(work, interval, cost, mtbf, seed) for seed in range(20)) / 20

    chosen = daly(cost, mtbf)
    tried = {factor: mean(chosen * factor) for factor in (0.2, 0.5, 0.75, 1.0, 1.33, 2.0, 5.0)}
    assert tried[1.0] <= 1.02 * min(tried.values())
    # And the choice matters: far from it, clearly more time is lost.
    waste = {factor: seconds / work - 1 for factor, seconds in tried.items()}
    assert waste[0.2] > 1.3 * waste[1.0]
    assert waste[5.0] > 1.3 * waste[1.0]
