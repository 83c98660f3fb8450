"""Steps fulfil the strong Wolfe conditions on functions of one number, also on ones with cliffs."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farandole.learn.lbfgs.line_search import Point, strong_wolfe


def search(
    loss: Callable[[float], float], slope: Callable[[float], float], first: float
) -> tuple[Point, Point, int]:
    tried: list[float] = []

    def at(step: float) -> Point:
        tried.append(step)
        return Point(step, loss(step), slope(step))

    start = Point(0.0, loss(0.0), slope(0.0))
    return start, strong_wolfe(at, start, first, 1.0), len(tried)


def fulfils(start: Point, found: Point) -> bool:
    falls = found.loss <= start.loss + 1e-4 * found.step * start.slope
    return falls and abs(found.slope) <= 0.9 * abs(start.slope)


@given(
    st.floats(0.01, 100),
    st.floats(1e-3, 1e3),
    st.floats(1e-4, 1e4),
)
def test_a_parabola(minimum: float, curvature: float, first: float) -> None:
    start, found, _ = search(
        lambda t: curvature * (t - minimum) ** 2 / 2, lambda t: curvature * (t - minimum), first
    )
    assert fulfils(start, found)


@given(st.floats(1e-3, 1e3), st.floats(0.1, 3.0))
def test_a_wavy_slope(first: float, height: float) -> None:
    start, found, _ = search(
        lambda t: -t + t * t / 50 + height * math.sin(t) / 4,
        lambda t: -1 + t / 25 + height * math.cos(t) / 4,
        first,
    )
    assert fulfils(start, found)


@pytest.mark.parametrize("beyond", [math.inf, math.nan])
def test_a_loss_that_is_not_finite_beyond_a_point(beyond: float) -> None:
    start, found, _ = search(
        lambda t: (t - 1) ** 2 if t < 1.3 else beyond,
        lambda t: 2 * (t - 1) if t < 1.3 else beyond,
        1000.0,
    )
    assert fulfils(start, found)


def test_a_loss_that_falls_for_ever_ends() -> None:
    _, found, tries = search(lambda t: -t, lambda t: -1.0, 1.0)
    assert found.loss < -1e10
    assert tries < 40


def test_numbers_that_can_get_no_lower_end() -> None:
    """The slope says downwards, the loss does not move: it is at the limit of its precision."""
    start, found, tries = search(lambda t: 1.0, lambda t: -1e-20, 1.0)
    assert found.loss == start.loss
    assert tries < 40
