"""The ranking: who reached the target first, and, where nobody did, who came nearest.

The rule, in order of weight: runs that failed come last; reached beats not reached; sooner beats
later; a better best value beats a worse one; seen earlier beats seen later; and what is still
level keeps the order in which the strategies were given.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from farandole.errors import UserError, nearest
from farandole.report.history import History, Point
from farandole.report.lane import Lane, MeasuredLink, labels
from farandole.report.target import Target, lower_is_better

# Metrics that say where a run is, not how good it is: never what a race is ranked by unasked.
POSITION_METRICS = frozenset(
    ("epoch", "step", "iteration", "batch", "sample", "time", "second", "lr", "learning_rate")
)


@dataclass(frozen=True)
class Goal:
    """The metric that ranks the lanes, and its direction."""

    metric: str
    higher_is_better: bool

    def best(self, history: History) -> Point | None:
        """The first log with the best finite value."""
        sign = -1 if self.higher_is_better else 1
        finite = [p for p in history.series(self.metric) if math.isfinite(p.metrics[self.metric])]
        return min(finite, key=lambda point: sign * point.metrics[self.metric], default=None)


@dataclass(frozen=True)
class Standing:
    """One lane's place. `index` is its position as given, which also fixes its colour."""

    place: int
    index: int
    label: str
    lane: Lane
    seconds_to_target: float | None
    best: float | None
    best_seconds: float | None
    speed_up: float | None
    energy_to_target: float | None = None  # joules

    @property
    def cost_to_target(self) -> float | None:
        return self.lane.cost(self.seconds_to_target)


@dataclass(frozen=True)
class Results:
    """A race as the report sees it; everything else follows from these.

    `runs` are all runs, where lanes were run with several seeds: then `lanes` has the typical run
    of each.
    """

    lanes: tuple[Lane, ...]
    target: Target | None = None
    facts: Mapping[str, str] = field(default_factory=dict)
    runs: tuple[Lane, ...] = ()
    judged_by: Goal | None = None  # without a target; None: what the lanes have logged decides

    @cached_property
    def goal(self) -> Goal | None:
        return choose_goal(self.lanes, self.target, self.judged_by)

    @cached_property
    def standings(self) -> tuple[Standing, ...]:
        """Best first."""
        return rank(self.lanes, self.target, self.judged_by)

    @cached_property
    def link(self) -> MeasuredLink | None:
        """Between the hosts, as the last lane that used it has measured it; None on one host."""
        return next((lane.link for lane in reversed(self.lanes) if lane.link is not None), None)

    @cached_property
    def simulated_links(self) -> tuple[str, ...]:
        """Links in software between pretended hosts, of any lane: there is one, or none."""
        return tuple(dict.fromkeys(filter(None, (lane.simulated_link for lane in self.lanes))))

    @cached_property
    def prices(self) -> tuple[float, ...]:
        """Of a worker-hour. One, or none, unless races with different prices are compared."""
        return tuple(dict.fromkeys(lane.price for lane in self.lanes if lane.price is not None))

    @cached_property
    def has_energy(self) -> bool:
        return any(lane.energy_joules is not None for lane in self.lanes)

    @cached_property
    def no_energy(self) -> str:
        """Why no lane has its energy measured."""
        said = () if self.has_energy else (lane.no_energy for lane in self.lanes)
        return next(filter(None, said), "")

    @cached_property
    def metric_names(self) -> tuple[str, ...]:
        """Every metric any lane logged, in the order of first appearance."""
        return _metric_names(lane.history for lane in self.lanes)


def choose_goal(
    lanes: Sequence[Lane], target: Target | None, judged_by: Goal | None = None
) -> Goal | None:
    """The target's metric; else `judged_by`; else the first metric logged that ever changes.

    Metrics that only say where a run is (`epoch`, `lr`, …) are passed over. Where none changes,
    the first one serves; where there is none at all, None: then samples per second rank.
    """
    if target is not None:
        return Goal(target.metric, target.higher_is_better)
    if judged_by is not None:
        return judged_by
    histories = [lane.history for lane in lanes]
    names = [name for name in _metric_names(histories) if not is_position(name)]
    changing = (name for name in names if any(_changes(name, h) for h in histories))
    name = next(changing, names[0] if names else None)
    return None if name is None else Goal(name, not lower_is_better(name))


def is_position(metric: str) -> bool:
    """`epoch`, `steps`, `lr`, …: where a run is, not how good."""
    return metric.lower().removesuffix("s") in POSITION_METRICS


def rank(
    lanes: Sequence[Lane], target: Target | None, judged_by: Goal | None = None
) -> tuple[Standing, ...]:
    """The lanes by the rule above, best first."""
    goal = choose_goal(lanes, target, judged_by)
    names = labels(lanes)
    reached = [target.reached(lane.history) if target else None for lane in lanes]
    best = [goal.best(lane.history) if goal else None for lane in lanes]

    def merit(index: int) -> tuple[float, ...]:
        lane, seconds, point = lanes[index], reached[index], best[index]
        sign = -1 if goal and goal.higher_is_better else 1
        return (
            lane.outcome == "failed",
            seconds is None,
            seconds or 0.0,
            sign * point.metrics[goal.metric] if goal and point else math.inf,
            point.time_seconds if point else math.inf,
            -(lane.samples_per_second or 0.0) if goal is None else 0.0,
        )

    return tuple(
        Standing(
            place=place,
            index=index,
            label=names[index],
            lane=lanes[index],
            seconds_to_target=reached[index],
            best=point.metrics[goal.metric] if goal and (point := best[index]) else None,
            best_seconds=point.time_seconds if (point := best[index]) else None,
            speed_up=_speed_up(lanes, reached, index, target),
            energy_to_target=_energy(lanes[index], target),
        )
        for place, index in enumerate(sorted(range(len(lanes)), key=merit), start=1)
    )


def require_metric(target: Target, histories: Sequence[History]) -> None:
    """Raise `UserError` when runs logged things, but none of them the target's metric.

    Runs that logged nothing at all prove nothing unless one of them ended well.
    """
    names = _metric_names(histories)
    if target.metric in names:
        return
    if names:
        raise UserError(
            f"the target is {target}, but the script never logged {target.metric!r}. "
            f"It logged: {', '.join(names)}. {nearest(target.metric, names)}"
        )
    if any(history.finished for history in histories):
        raise UserError(
            f"the target is {target}, but the script logged nothing. "
            f"Add run.log({_keyword(target.metric)}=...) where it evaluates the model."
        )


def _speed_up(
    lanes: Sequence[Lane], reached: Sequence[float | None], index: int, target: Target | None
) -> float | None:
    """Against the first lane given: in time to target, or, without a target, in throughput."""
    if target is not None:
        ours, theirs = reached[index], reached[0]
    else:
        theirs, ours = lanes[index].samples_per_second, lanes[0].samples_per_second
    return theirs / ours if theirs is not None and ours else None


def _energy(lane: Lane, target: Target | None) -> float | None:
    point = target.first_met(lane.history) if target else None
    return None if point is None else point.energy_joules


def _metric_names(histories: Iterable[History]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for history in histories for name in history.metric_names))


def _changes(metric: str, history: History) -> bool:
    values = [point.metrics[metric] for point in history.series(metric)]
    return any(value != values[0] for value in values[1:])


def _keyword(metric: str) -> str:
    return metric if metric.isidentifier() else "accuracy"
