"""A step along a direction that fulfils the strong Wolfe conditions (Nocedal & Wright, 3.5, 3.6).

    loss(t) ≤ loss(0) + c₁ t slope(0)        it falls enough
    |slope(t)| ≤ c₂ |slope(0)|               and is flat enough

Only numbers: the vectors are somewhere else. Steps are chosen as `torch.optim.LBFGS` does.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

_DECREASE, _CURVATURE = 1e-4, 0.9
_MOST_STEPS = 25
_LEAST_CHANGE = 1e-14  # of the parameters, in the direction's own length
_EPSILON = 2.0**-52


class Point(NamedTuple):
    """A step, with the loss and its slope there."""

    step: float
    loss: float
    slope: float


Evaluate = Callable[[float], Point]


def strong_wolfe(at: Evaluate, start: Point, first: float, norm: float) -> Point:
    """The best point that was found; it fulfils the conditions unless 25 steps were too few.

    `start` is step 0, with a slope below 0. `norm` is the length of the direction.
    """
    before, point = start, at(first)
    count = 1
    while not _too_far(point, start) and not (count > 2 and point.loss >= before.loss):
        if abs(point.slope) <= -_CURVATURE * start.slope:
            return point
        if point.slope >= 0:
            break
        if count > _MOST_STEPS:
            return point
        least, most = point.step + 0.01 * (point.step - before.step), 10 * point.step
        step = _cubic(before, point, least, most)
        before, point = point, at(step)
        count += 1
    return _zoom(at, start, before, point, norm, _MOST_STEPS - count)


def noise(start: Point) -> float:
    """So much a loss may differ by rounding alone. Near the minimum the slope still says where it
    is when the loss does not any more."""
    return 8 * _EPSILON * abs(start.loss)


def _too_far(point: Point, start: Point) -> bool:
    if not (math.isfinite(point.loss) and math.isfinite(point.slope)):
        return True
    return point.loss > start.loss + _DECREASE * point.step * start.slope + noise(start)


def _zoom(at: Evaluate, start: Point, low: Point, high: Point, norm: float, turns: int) -> Point:
    """Between two points, of which the first is to become the lower one."""
    if _loss(high) < _loss(low):
        low, high = high, low
    stuck = False
    for _ in range(turns):
        left, right = sorted((low.step, high.step))
        if (right - left) * norm < _LEAST_CHANGE:
            break
        step = _cubic(low, high, left, right)
        margin = 0.1 * (right - left)
        # A step at an edge of the interval twice in a row would make it shrink ever more slowly.
        near = min(right - step, step - left) < margin
        if near and (stuck or step >= right or step <= left):
            step = right - margin if abs(step - right) < abs(step - left) else left + margin
            near = False
        stuck = near
        point = at(step)
        if _too_far(point, start) or point.loss > low.loss + noise(start):
            high = point
            continue
        if abs(point.slope) <= -_CURVATURE * start.slope:
            return point
        if point.slope * (high.step - low.step) >= 0:
            high = low
        low = point
    return low


def _loss(point: Point) -> float:
    return point.loss if math.isfinite(point.loss) else math.inf


def _cubic(one: Point, two: Point, least: float, most: float) -> float:
    """Where the cubic through both has its minimum, within bounds; else the middle."""
    if one.step > two.step:
        one, two = two, one
    numbers = (one.loss, one.slope, two.loss, two.slope)
    if all(map(math.isfinite, numbers)) and one.step < two.step:
        width = two.step - one.step
        sum_ = one.slope + two.slope - 3 * (two.loss - one.loss) / width
        square = sum_**2 - one.slope * two.slope
        if square >= 0:
            root = math.sqrt(square)
            below = two.slope - one.slope + 2 * root
            if below:
                step = two.step - width * ((two.slope + root - sum_) / below)
                return min(max(step, least), most)
    return (least + most) / 2
