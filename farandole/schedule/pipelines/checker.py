"""Proves a pipeline: each rank's list by itself, then all of them together.

By itself: what is computed is computed once, on its home, forward before backward, and with a
version of the weights that exists. Together: nothing is missing, and nobody waits for ever. Every
action is looked at a few times, so checking costs no more than building.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NoReturn

from farandole.schedule.error import ScheduleError
from farandole.schedule.pipelines.actions import Action, Kind, Pipeline
from farandole.schedule.pipelines.player import Costs, describe, play

Computed = tuple[int, int, int]
"""Stage, micro-batch, direction."""
_FOLLOWS: Mapping[Kind, Kind | None] = MappingProxyType({"F": None, "B": "F", "I": "F", "W": "I"})
"""What was last done with a micro-batch on a stage before each kind of action."""


def check(pipeline: Pipeline, *, same_version: bool = True) -> None:
    """Returns if `pipeline` is right; raises `ScheduleError` with rank, action and position if not.

    `same_version=False` is for schemes in which a backward does not use the weights of its forward.
    """
    computed: set[Computed] = set()
    for rank in range(pipeline.ranks):
        computed |= _Rank(pipeline, rank, same_version).check()
    _check_all_there(pipeline, computed)
    # Whether ranks wait for each other for ever does not depend on how long things take, so any
    # costs will do: an action waits for certain other actions, not for a time.
    for _ in play(pipeline, Costs.even(pipeline.stages)):
        pass


class _Rank:
    """Goes through the list of one rank and remembers how far each thing has come."""

    def __init__(self, pipeline: Pipeline, rank: int, same_version: bool) -> None:
        self.pipeline = pipeline
        self.rank = rank
        self.stages = pipeline.stages
        self.directions = len(pipeline.homes)
        self.same_version = same_version
        self.last: dict[Computed, Action] = {}
        self.newest = 0  # version
        self.updated = True  # no gradient waits for an update

    def check(self) -> set[Computed]:
        """What this rank computes, all of it right."""
        for position, action in enumerate(self.pipeline.actions[self.rank]):
            if action.kind == "U":
                self._update(position, action)
            else:
                self._compute(position, action)
        end = len(self.pipeline.actions[self.rank])
        for action in self.last.values():
            if action.kind in ("F", "I"):
                lacks = "backward" if action.kind == "F" else "W"
                self._fail(end, action, f"has no {lacks} before the end of the list")
        if not self.updated:
            self._fail(end, None, "has gradients that no update uses")
        return set(self.last)

    def _update(self, position: int, action: Action) -> None:
        if action.version != self.newest + 1:
            self._fail(position, action, f"follows version {self.newest}")
        self.newest += 1
        self.updated = True

    def _compute(self, position: int, action: Action) -> None:
        kind, stage, micro, direction, version = action
        self._check_place(position, action)
        this = (stage, micro, direction)
        before = self.last.get(this)
        if (before.kind if before else None) != _FOLLOWS[kind]:
            found = f"comes after {before}" if before else "comes first"
            wanted = _FOLLOWS[kind] or "nothing"
            self._fail(position, action, f"{found}, but should follow {wanted}")
        if not 0 <= version <= self.newest:
            exist = f"0 … {self.newest}" if self.newest else "0"
            self._fail(position, action, f"uses version {version}; so far there is {exist}")
        if before and before.version != version and self.same_version:
            self._fail(
                position, action, f"uses version {version}, but {before} used {before.version}"
            )
        self.last[this] = action
        # Gradients of the weights exist after B or W. An update must follow them, or they would be
        # added to those of the next step.
        if kind == "B" or kind == "W":
            self.updated = False

    def _check_place(self, position: int, action: Action) -> None:
        _, stage, micro, direction, _ = action
        pipeline = self.pipeline
        for name, value, count in (
            ("stage", stage, self.stages),
            ("micro-batch", micro, pipeline.micros),
            ("direction", direction, self.directions),
        ):
            if not 0 <= value < count:
                self._fail(position, action, f"names {name} {value}, outside 0 … {count - 1}")
        home = pipeline.home(stage, micro, direction)
        if home != self.rank:
            self._fail(position, action, f"belongs on rank {home}")

    def _fail(self, position: int, action: Action | None, problem: str) -> NoReturn:
        what = f"{describe(action)} " if action else ""
        raise ScheduleError(
            f"{self.pipeline.name}, rank {self.rank}, position {position}: {what}{problem}."
        )


def _check_all_there(pipeline: Pipeline, computed: set[Computed]) -> None:
    """Every micro-batch passes all stages in one direction, and in no other."""
    direction_of: dict[int, int] = {}
    for stage, micro, direction in computed:
        if direction_of.setdefault(micro, direction) != direction:
            raise ScheduleError(
                f"{pipeline.name}, stage {stage}: micro-batch {micro} is computed in direction "
                f"{direction} and in direction {direction_of[micro]}."
            )
    if len(computed) == pipeline.stages * pipeline.micros:
        return
    for micro in range(pipeline.micros):
        direction = direction_of.get(micro, 0)
        for stage in range(pipeline.stages):
            if (stage, micro, direction) not in computed:
                home = pipeline.home(stage, micro, direction)
                raise ScheduleError(
                    f"{pipeline.name}, rank {home}: F{micro} of stage {stage} is missing."
                )
