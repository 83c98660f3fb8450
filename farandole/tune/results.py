"""What a study has found, in a terminal: its best trials, and the command that repeats the best."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

import click
from optuna.trial import FrozenTrial, TrialState
from rich.console import Console
from rich.table import Table

from farandole.report import units
from farandole.tune.options import TuneOptions
from farandole.tune.record import COMPLETE, FAILED, RUNNING, STOPPED_EARLY
from farandole.tune.schemes import scheme_spaces, scheme_words
from farandole.tune.study import FOLDER, PROBLEM, SECONDS, Study

_SHOWN = 10
STATES = {
    TrialState.COMPLETE: COMPLETE,
    TrialState.PRUNED: STOPPED_EARLY,
    TrialState.FAIL: FAILED,
    TrialState.RUNNING: RUNNING,
}


def describe(trial: FrozenTrial, metric: str) -> str:
    """One line, when it is over."""
    how = STATES.get(trial.state, "waiting")
    if trial.state == TrialState.COMPLETE:
        how = f"{metric} {units.number(trial.value)}"
    elif trial.state == TrialState.PRUNED:
        last = trial.intermediate_values[trial.last_step] if trial.last_step is not None else None
        how = f"stopped early at {metric} {units.number(last)}"
    elif PROBLEM in trial.user_attrs:
        how = f"failed: {trial.user_attrs[PROBLEM]}"
    took = units.seconds(trial.user_attrs.get(SECONDS))
    return f"trial {trial.number}: {how}  ·  {choices_text(trial.params)}  ·  {took}"


def choices_text(params: Mapping[str, Any]) -> str:
    """`lr 0.0123, width 64`, in the order in which they were chosen."""
    return ", ".join(f"{name} {value_text(value)}" for name, value in params.items()) or "–"


def value_text(value: Any) -> str:
    is_number = isinstance(value, float) and not isinstance(value, bool)
    return units.number(value) if is_number else str(value)


def command_of(trial: FrozenTrial, options: TuneOptions) -> str:
    """What to type to run it again."""
    scheme = {name: trial.params[name] for name in scheme_spaces(options) if name in trial.params}
    words = ["farandole", "run", "-n", str(options.workers), *options.where.words()]
    words += scheme_words(scheme)
    for name, value in trial.params.items():
        words += [] if name in scheme else ["--choose", f"{name}={value}"]
    return shlex.join([*words, "--seed", str(options.seed), *options.command])


def counts(study: Study) -> dict[str, int]:
    states = [trial.state for trial in study.trials()]
    return {text: states.count(state) for state, text in STATES.items() if state in states}


def show(study: Study, options: TuneOptions, console: Console) -> None:
    """The best trials, how many ended how, and how to run the best again."""
    ranked = study.ranked()
    names = list(dict.fromkeys(name for trial in ranked for name in trial.params))
    if ranked:
        table = Table()
        for title in ("trial", options.metric, *names, "time"):
            table.add_column(title, justify="left" if title in names else "right")
        for trial in ranked[:_SHOWN]:
            values = [value_text(trial.params.get(name, "–")) for name in names]
            took = units.seconds(trial.user_attrs.get(SECONDS))
            table.add_row(str(trial.number), units.number(trial.value), *values, took)
        console.print(table)
    said = ", ".join(f"{count} {state}" for state, count in counts(study).items()) or "none"
    click.echo(f"trials: {said}")
    if not ranked:
        click.secho("no trial has come to its end", fg="red")
        return
    best = ranked[0]
    click.secho(
        f"best: trial {best.number}, {options.metric} {units.number(best.value)} with "
        f"{choices_text(best.params)}",
        bold=True,
    )
    if options.populations is None:
        click.echo(f"run it again: {command_of(best, options)}")
    else:
        place = study.path.parent / str(best.user_attrs.get(FOLDER)) / "checkpoints"
        click.echo(f"its choices changed while it trained; the weights of that member: {place}")
