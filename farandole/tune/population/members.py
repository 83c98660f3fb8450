"""What a population has done so far, kept in the study: one trial for each member and interval."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import optuna
from optuna.trial import FrozenTrial, TrialState, create_trial

from farandole.train.choosing.choice import Value
from farandole.tune.study import FOLDER, PROBLEM, SECONDS, Study, distribution_of

GENERATION, MEMBER, PARENT, NEW = "generation", "member", "parent", "new"
STRUCTURE = "structure"


@dataclass(frozen=True)
class Interval:
    """One member's part of one generation. `value` is None where it failed."""

    generation: int
    member: int
    choices: dict[str, Value]
    value: float | None
    parent: int | None
    is_new: bool
    problem: str = ""
    seconds: float = 0.0

    def origin(self) -> str:
        if self.is_new:
            return "started anew with another structure"
        return "" if self.parent is None else f"went on from member {self.parent}"


class Members:
    """Reads and writes them."""

    def __init__(self, study: Study) -> None:
        self._study = study

    def intervals(self) -> dict[tuple[int, int], Interval]:
        """By generation and member."""
        found = [_interval(t) for t in self._study.trials() if GENERATION in t.user_attrs]
        return {(each.generation, each.member): each for each in found}

    def add(self, done: Interval, folder: str) -> FrozenTrial:
        spaces = self._study.spaces()
        failed = done.value is None or not math.isfinite(done.value)
        attributes: dict[str, Any] = {
            GENERATION: done.generation,
            MEMBER: done.member,
            PARENT: done.parent,
            NEW: done.is_new,
            FOLDER: folder,
            SECONDS: round(done.seconds, 2),
            **({PROBLEM: done.problem} if done.problem else {}),
        }
        self._study.optuna.add_trial(
            create_trial(
                state=TrialState.FAIL if failed else TrialState.COMPLETE,
                value=None if failed else done.value,
                params=dict(done.choices),
                distributions={name: distribution_of(spaces[name]) for name in done.choices},
                user_attrs=attributes,
            )
        )
        return self._study.optuna.get_trials(deepcopy=False)[-1]

    def structure(self) -> set[str]:
        """The choices that decide the shape of the model."""
        return set(self._study.optuna.user_attrs.get(STRUCTURE, []))

    def add_structure(self, name: str) -> None:
        known = self.structure()
        if name not in known:
            self._study.optuna.set_user_attr(STRUCTURE, sorted({*known, name}))

    def rank(self, values: Mapping[int, float | None]) -> list[int]:
        """The best first, those that failed last."""
        sign = -1.0 if self._study.higher_is_better else 1.0

        def place(member: int) -> tuple[bool, float, int]:
            value = values[member]
            return value is None, 0.0 if value is None else sign * value, member

        return sorted(values, key=place)


def _interval(trial: optuna.trial.FrozenTrial) -> Interval:
    known = trial.user_attrs
    return Interval(
        int(known[GENERATION]),
        int(known[MEMBER]),
        dict(trial.params),
        trial.value if trial.state == TrialState.COMPLETE else None,
        known.get(PARENT),
        bool(known.get(NEW)),
        str(known.get(PROBLEM, "")),
        float(known.get(SECONDS, 0.0)),
    )
