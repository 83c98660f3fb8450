"""What the page shows, worked out of a study."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import Any

import optuna
from optuna.trial import FrozenTrial, TrialState

from farandole.tune.results import STATES, value_text
from farandole.tune.study import PROBLEM, SECONDS, Study

FEWEST_FOR_IMPORTANCE = 10


@dataclass(frozen=True)
class Row:
    """One trial. `value` is its last of the metric, also where it did not come to its end."""

    number: int
    state: str
    value: float | None
    params: dict[str, Any]
    seconds: float | None
    problem: str

    @property
    def is_complete(self) -> bool:
        return self.state == STATES[TrialState.COMPLETE]

    @property
    def texts(self) -> dict[str, str]:
        return {name: value_text(value) for name, value in self.params.items()}


def rows_of(study: Study) -> list[Row]:
    return [_row(trial) for trial in study.trials()]


def _row(trial: FrozenTrial) -> Row:
    value = trial.value if trial.state == TrialState.COMPLETE else None
    if value is None and trial.last_step is not None:
        value = trial.intermediate_values[trial.last_step]
    if value is not None and not math.isfinite(value):
        value = None
    return Row(
        trial.number,
        STATES.get(trial.state, "waiting"),
        value,
        dict(trial.params),
        trial.user_attrs.get(SECONDS),
        str(trial.user_attrs.get(PROBLEM, "")),
    )


def best_so_far(rows: list[Row], higher_is_better: bool) -> list[tuple[int, float]]:
    """The trials that were better than all before them, by number."""
    found: list[tuple[int, float]] = []
    for row in rows:
        if not row.is_complete or row.value is None:
            continue
        if not found or (row.value > found[-1][1]) == higher_is_better != (
            row.value == found[-1][1]
        ):
            found.append((row.number, row.value))
    return found


def importances(study: Study) -> dict[str, float]:
    """The share of each choice in the differences between good trials and all; empty: too few.

    By PED-ANOVA, for choices that every complete trial has.
    """
    complete = study.ranked()
    if len(complete) < FEWEST_FOR_IMPORTANCE:
        return {}
    common = [n for n in complete[0].params if all(n in trial.params for trial in complete)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return dict(
                optuna.importance.get_param_importances(
                    study.optuna,
                    evaluator=optuna.importance.PedAnovaImportanceEvaluator(),
                    params=common,
                )
            )
        except (ValueError, RuntimeError, ArithmeticError):  # all values are the same, say
            return {}
