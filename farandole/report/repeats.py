"""Lanes that were run with several seeds: how sure their order is.

Each lane has one time to the target for each seed; a run that never reached it counts as one that
takes forever. Two lanes are in order when, of their times drawn again and again with replacement
(the bootstrap), the median of one is below that of the other almost always. Otherwise they are
tied, and share a place.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from farandole.report.lane import Lane, labels
from farandole.report.standing import Goal, choose_goal
from farandole.report.target import Target

TOO_CLOSE = 1.05
"""Closer than this, one run of each cannot tell two strategies apart."""
CERTAIN = 0.95
_DRAWS = 2000


@dataclass(frozen=True)
class Repeats:
    """All runs of one lane. `index` is its position as given."""

    index: int
    label: str
    runs: tuple[Lane, ...]
    seconds: tuple[float, ...]  # to the target, by run; infinite: never
    values: tuple[float, ...]  # the best of each run that logged one

    @property
    def reached(self) -> int:
        return sum(math.isfinite(value) for value in self.seconds)

    @property
    def median_seconds(self) -> float:
        return statistics.median(self.seconds)

    @property
    def median_value(self) -> float | None:
        return statistics.median(self.values) if self.values else None

    @cached_property
    def interval_seconds(self) -> tuple[float, float]:
        """Where the median is, with 95 % certainty, as far as so few runs can tell."""
        drawn = sorted(_medians(self.seconds, self.index))
        return drawn[int(0.025 * _DRAWS)], drawn[int(0.975 * _DRAWS) - 1]

    @property
    def typical(self) -> Lane:
        """The run whose time is nearest to the median: it stands for the lane in the plots."""
        median = self.median_seconds

        def distance(at: int) -> float:
            value = self.seconds[at]
            return 0.0 if value == median else abs(value - median)  # two infinities are equal

        return self.runs[min(range(len(self.runs)), key=distance)]


@dataclass(frozen=True)
class Placed:
    """A lane's place: the same for lanes that are tied."""

    place: int
    tied: bool
    first: int  # for how many seeds it was the first to reach the target
    repeats: Repeats


def group(lanes: Sequence[Lane], target: Target | None) -> tuple[Repeats, ...]:
    """The runs of each lane together, in the order in which the lanes were given."""
    runs: dict[tuple[str, int], list[Lane]] = {}
    for lane in lanes:
        runs.setdefault((lane.name, lane.workers), []).append(lane)
    goal = choose_goal(lanes, target)
    names = labels([of_lane[0] for of_lane in runs.values()])
    return tuple(
        Repeats(
            index,
            names[index],
            tuple(of_lane),
            tuple(_seconds(lane, target) for lane in of_lane),
            tuple(value for lane in of_lane if (value := _best(lane, goal)) is not None),
        )
        for index, of_lane in enumerate(runs.values())
    )


def are_repeated(lanes: Sequence[Lane]) -> bool:
    names = [(lane.name, lane.workers) for lane in lanes]
    seeds = {lane.seed for lane in lanes}
    return len(seeds - {None}) > 1 and len(set(names)) < len(names)


def placed(lanes: Sequence[Lane], target: Target | None) -> tuple[Placed, ...]:
    """Best first, by the median; then by the best value. Lanes that all failed come last."""
    goal = choose_goal(lanes, target)
    sign = -1 if goal and goal.higher_is_better else 1

    def merit(repeats: Repeats) -> tuple[float, ...]:
        value = repeats.median_value
        return (
            all(run.outcome == "failed" for run in repeats.runs),
            repeats.median_seconds,
            -repeats.reached,
            math.inf if value is None else sign * value,
        )

    ordered = sorted(group(lanes, target), key=merit)
    wins = _wins(ordered)
    found: list[Placed] = []
    leaders: list[int] = []  # the first of those with the same place
    for at, repeats in enumerate(ordered):
        tied = bool(leaders) and not certainly_before(ordered[leaders[-1]], repeats)
        leaders.append(leaders[-1] if tied else at)
        found.append(Placed(leaders[-1] + 1, False, wins[repeats.index], repeats))
    shared = [leaders.count(leader) > 1 for leader in leaders]
    return tuple(
        Placed(row.place, tied, row.first, row.repeats)
        for row, tied in zip(found, shared, strict=True)
    )


def certainly_before(one: Repeats, other: Repeats) -> bool:
    """Whether the runs suffice to say that `one` reaches the target sooner than `other`."""
    if not math.isfinite(one.median_seconds):
        return False  # neither reaches it: nothing is said about their times
    if min(len(one.seconds), len(other.seconds)) == 1:
        return one.median_seconds * TOO_CLOSE < other.median_seconds
    sooner = sum(
        mine < theirs
        for mine, theirs in zip(
            _medians(one.seconds, one.index), _medians(other.seconds, other.index), strict=True
        )
    )
    return sooner >= CERTAIN * _DRAWS


def _medians(values: Sequence[float], salt: int) -> list[float]:
    """Of samples drawn with replacement; the same ones every time."""
    source = random.Random(salt)
    return [statistics.median(source.choices(values, k=len(values))) for _ in range(_DRAWS)]


def _wins(repeats: Sequence[Repeats]) -> Mapping[int, int]:
    """For how many seeds each lane, by its index, was first. Runs without a seed do not count."""
    wins = dict.fromkeys((lane.index for lane in repeats), 0)
    seeds = {run.seed for lane in repeats for run in lane.runs if run.seed is not None}
    for seed in seeds:
        times = [
            (seconds, lane.index)
            for lane in repeats
            for run, seconds in zip(lane.runs, lane.seconds, strict=True)
            if run.seed == seed and math.isfinite(seconds)
        ]
        if times:
            wins[min(times)[1]] += 1
    return wins


def _seconds(lane: Lane, target: Target | None) -> float:
    reached = target.reached(lane.history) if target else None
    return math.inf if reached is None or lane.outcome == "failed" else reached


def _best(lane: Lane, goal: Goal | None) -> float | None:
    point = goal.best(lane.history) if goal else None
    return point.metrics[goal.metric] if goal and point else None
