"""Runs the trials of a study side by side, each on its share of the machines."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from optuna.trial import Trial, TrialState

from farandole.errors import UserError
from farandole.launch.nested_runs import WarmProcesses
from farandole.train.choosing.choice import Value
from farandole.train.choosing.predictions import read_predictions
from farandole.tune import owner
from farandole.tune.ensemble import CALL
from farandole.tune.options import TuneOptions
from farandole.tune.results import describe
from farandole.tune.schemes import check_name, scheme_spaces, scheme_words
from farandole.tune.slots import Slots
from farandole.tune.study import FOLDER, OWNER, PROBLEM, SECONDS, Study
from farandole.tune.trial_run import Start, TrialRun

_POLL_SECONDS = 0.02  # a trial waits so long for the answer to each of its questions


class Running:
    """A trial of the study, and the run of it that is under way."""

    def __init__(self, trial: Trial, run: TrialRun, slot: int) -> None:
        self.trial, self.run, self.slot = trial, run, slot


class Tuner:
    """`run` returns when the study has its trials. Whatever ends it, no trial goes on."""

    def __init__(
        self,
        options: TuneOptions,
        study: Study,
        folder: Path,
        slots: Slots,
        warm: WarmProcesses,
        on_change: Callable[[], None],
    ) -> None:
        self._options = options
        self._study = study
        self._folder = folder
        self._slots = slots
        self._warm = warm
        self._on_change = on_change  # a trial has begun, has all its choices, or is over
        self._running: list[Running] = []
        self._is_full = False  # as far as is known since the last trial has ended

    def run(self) -> None:
        try:
            while True:
                while (slot := self._next_slot()) is not None:
                    self._running.append(self._begin(slot))
                if not self._running:
                    return
                for each in list(self._running):
                    self._step(each)
                time.sleep(_POLL_SECONDS)
        finally:
            self._stop_all()

    def _next_slot(self) -> int | None:
        """A free one, where another trial is to begin."""
        if self._is_full or (slot := self._slots.take()) is None:
            return None
        # A grid must know what those have chosen that have just begun, or it would try that again.
        beginning = self._study.is_grid and any(not each.run.values() for each in self._running)
        if not beginning:
            known = len(self._study.trials())
            self._is_full = known >= (self._options.trials or 0) or self._study.is_exhausted
        if beginning or self._is_full:
            self._slots.give_back(slot)
            return None
        return slot

    def _begin(self, slot: int) -> Running:
        trial = self._study.optuna.ask()
        name = f"trial-{trial.number}"
        trial.set_user_attr(OWNER, owner.this_process())
        trial.set_user_attr(FOLDER, name)
        chosen = {
            key: self._study.suggest(trial, key, space)
            for key, space in scheme_spaces(self._options).items()
        }
        options = self._options
        share = self._slots.share(slot)
        words = ["-n", str(options.workers), *share.words, *scheme_words(chosen)]
        words += ["--seed", str(options.seed), "--grace", f"{options.grace:g}", *options.command]
        start = Start(
            name,
            self._folder,
            words,
            self._slots.workers_here,
            share.variables,
            options.timeout,
            options.grace,
        )
        begun = Running(trial, TrialRun(start, self._warm, options.metric), slot)
        self._on_change()
        return begun

    def _step(self, each: Running) -> None:
        while (question := each.run.question()) is not None:
            self._answer(each, question)
        is_over = each.run.look()
        self._report(each, is_over)
        if is_over:
            self._running.remove(each)
            self._slots.give_back(each.slot)
            self._end(each)
            self._is_full = False

    def _answer(self, each: Running, question: dict[str, Any]) -> None:
        def decide() -> Value:
            check_name(question["name"], self._options)
            return self._study.suggest(each.trial, question["name"], question["space"])

        each.run.answer(question["name"], decide)

    def _report(self, each: Running, is_over: bool) -> None:
        """The study hears of every value, and may have seen enough of this trial."""
        values = each.run.values()
        is_first = values and not each.run.reported
        for step in range(each.run.reported, len(values)):
            each.trial.report(values[step], step)
            each.run.reported = step + 1
            if not is_over and not each.run.is_stopping and each.trial.should_prune():
                each.run.stop("pruned", f"after {step + 1} values of {self._options.metric}")
        if is_first:
            self._on_change()

    def _end(self, each: Running) -> None:
        state, why = each.run.result()
        values = each.run.values()
        if state == "ok" and not values:
            self._study.interrupt(each.trial.number)
            raise self._unlogged(each.run)
        if state == "ok" and self._options.ensemble and read_predictions(each.run.folder) is None:
            self._study.interrupt(each.trial.number)
            raise UserError(f"--ensemble: the script must call {CALL} for its validation data.")
        each.trial.set_user_attr(SECONDS, round(each.run.seconds, 2))
        if why:
            each.trial.set_user_attr(PROBLEM, why)
        if state == "ok":
            self._study.optuna.tell(each.trial, values[-1])
        elif state == "pruned" and values and math.isfinite(values[-1]):
            self._study.optuna.tell(each.trial, state=TrialState.PRUNED)
        else:
            self._study.optuna.tell(each.trial, state=TrialState.FAIL)
        (frozen,) = (t for t in self._study.trials() if t.number == each.trial.number)
        click.echo(describe(frozen, self._options.metric))
        self._on_change()

    def _unlogged(self, run: TrialRun) -> UserError:
        known = ", ".join(run.history.metric_names) or "nothing"
        return UserError(
            f"--metric {self._options.metric}: the script does not log it. It logs {known}."
        )

    def _stop_all(self) -> None:
        for each in self._running:
            each.run.stop("interrupted", "")
        while waiting := [each for each in self._running if not each.run.look()]:
            time.sleep(_POLL_SECONDS)
            del waiting
        for each in self._running:
            self._study.interrupt(each.trial.number)
            self._slots.give_back(each.slot)
        self._running.clear()
