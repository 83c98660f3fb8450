"""Plays a pipeline: every rank goes through its list in order and waits where it must.

    F of stage s       waits for F of stage s − 1
    B, I of stage s    wait for its own F and for B or I of stage s + 1
    W                  waits for its own I
    U                  is a meeting: waits until all ranks that hold one of its stages are there

The runtime waits for the same things, and messages queue until they are wanted, so a pipeline that
plays to its end cannot hang. The checker asks no more than that; the simulator reads the times.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from farandole.errors import UserError
from farandole.schedule.error import ScheduleError
from farandole.schedule.pipelines.actions import Action, Kind, Pipeline

Event = tuple[str, int, int, int]
"""A forward ("F") or gradient ("B") of a stage, micro-batch and direction is there; or a rank has
come ("U") to the update of a version."""


@dataclass(frozen=True)
class Costs:
    """How long things take. A transfer keeps no rank busy; inside a rank nothing is transferred."""

    forward_seconds: Sequence[float]  # by stage
    backward_seconds: Sequence[float]  # by stage
    input_share: float = 0.5  # of a backward's time that its first half (I) takes
    transfer_seconds: float = 0.0  # of an activation or a gradient, from rank to rank
    update_seconds: float = 0.0

    def __post_init__(self) -> None:
        times = (*self.forward_seconds, *self.backward_seconds)
        for value in (*times, self.transfer_seconds, self.update_seconds):
            if not 0 <= value < math.inf:
                raise UserError(f"a cost of {value:g} seconds; give a finite number, 0 or more.")
        if not 0 <= self.input_share <= 1:
            raise UserError(f"input_share={self.input_share:g} is no share; give 0 to 1.")

    @classmethod
    def even(
        cls, stages: int, forward_seconds: float = 1.0, backward_seconds: float = 2.0
    ) -> Costs:
        """All stages alike."""
        return cls((forward_seconds,) * stages, (backward_seconds,) * stages)

    def table(self) -> dict[Kind, list[float]]:
        """Seconds by kind and stage; an update has its one number at stage −1."""
        backward = self.backward_seconds
        return {
            "F": list(self.forward_seconds),
            "B": list(backward),
            "I": [seconds * self.input_share for seconds in backward],
            "W": [seconds * (1 - self.input_share) for seconds in backward],
            "U": [self.update_seconds],
        }


class Span(NamedTuple):
    """A rank did something from `begin` to `end`, in seconds since the start."""

    rank: int
    action: Action
    begin: float
    end: float


def play(pipeline: Pipeline, costs: Costs) -> Iterator[Span]:
    """What every rank does when; in an order in which nothing comes before what it waited for.

    Raises `ScheduleError` when all ranks that are left wait for each other.
    """
    for name in ("forward_seconds", "backward_seconds"):
        given = len(getattr(costs, name))
        if given != pipeline.stages:
            raise UserError(f"{name}: {given} numbers for {pipeline.stages} stages.")
    seconds = costs.table()
    neighbours = meetings(pipeline)
    last = pipeline.stages - 1
    position = [0] * pipeline.ranks
    free = [0.0] * pipeline.ranks  # when the rank has ended what it did
    there: dict[Event, tuple[float, int]] = {}  # when, and on which rank
    waiting: dict[Event, list[int]] = {}
    ready = list(range(pipeline.ranks))
    while ready:
        # In any order: what is there once stays there, so playing one rank never takes a
        # possibility away from another. If all are stuck, they would be stuck in every order.
        rank = ready.pop()
        for action in islice(pipeline.actions[rank], position[rank], None):
            kind, stage, micro, direction, version = action
            if kind == "U":
                come = ("U", version, rank, 0)
                # The rank stands here until all others have come, and is played from here again
                # each time.
                there.setdefault(come, (free[rank], rank))
                ready += waiting.pop(come, ())
            begin = free[rank]
            missing = None
            for event in needs(action, neighbours[rank], last):
                if event not in there:
                    missing = event
                    break
                when, where = there[event]
                if where != rank and kind != "U":
                    when += costs.transfer_seconds
                if when > begin:
                    begin = when
            if missing is not None:
                # It waits for one missing event at a time, and is woken by that one alone. So every
                # action is looked at as often as it has something to wait for.
                waiting.setdefault(missing, []).append(rank)
                break
            end = free[rank] = begin + seconds[kind][stage]
            yield Span(rank, action, begin, end)
            position[rank] += 1
            if kind == "F" or kind == "B" or kind == "I":
                made = ("F" if kind == "F" else "B", stage, micro, direction)
                there[made] = (end, rank)
                if made in waiting:
                    ready += waiting.pop(made)
    if waiting:
        raise ScheduleError(_deadlock(pipeline, position, waiting))


def meetings(pipeline: Pipeline) -> list[tuple[int, ...]]:
    """For each rank, all that it meets in an update: those that hold one of its stages."""
    return [
        tuple(sorted({peer for stage in pipeline.held(rank) for peer in pipeline.holders(stage)}))
        for rank in range(pipeline.ranks)
    ]


def needs(action: Action, neighbours: Sequence[int], last: int) -> tuple[Event, ...]:
    """What must be there before an action; `last` is the number of the last stage."""
    kind, stage, micro, direction, version = action
    if kind == "F":
        return (("F", stage - 1, micro, direction),) if stage > 0 else ()
    if kind == "U":
        return tuple(("U", version, peer, 0) for peer in neighbours)
    if kind == "W":
        return (("B", stage, micro, direction),)
    own = ("F", stage, micro, direction)
    return (own, ("B", stage + 1, micro, direction)) if stage < last else (own,)


def _deadlock(pipeline: Pipeline, position: Sequence[int], waiting: dict[Event, list[int]]) -> str:
    stuck = {rank: event for event, ranks in waiting.items() for rank in ranks}
    lines = [
        f"rank {rank} waits before {describe(pipeline.actions[rank][position[rank]])} "
        f"(position {position[rank]}) for {_describe_event(pipeline, event)}"
        for rank, event in sorted(stuck.items())
    ]
    return f"{pipeline.name}: these ranks wait for ever: {'; '.join(lines)}."


def describe(action: Action) -> str:
    """An action in an error message."""
    if action.kind == "U":
        return f"the update to version {action.version}"
    of = f" in direction {action.direction}" if action.direction else ""
    return f"{action} of stage {action.stage}{of}"


def _describe_event(pipeline: Pipeline, event: Event) -> str:
    kind, stage, micro, direction = event
    if kind == "U":
        return f"rank {micro} to come to the update to version {stage}"
    what = "forward" if kind == "F" else "gradient"
    where = pipeline.home(stage, micro, direction)
    return f"the {what} of micro-batch {micro} from stage {stage} (rank {where})"
