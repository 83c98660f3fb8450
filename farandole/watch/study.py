"""The sections of a study that are not those of a race: its title and its trials."""

from __future__ import annotations

from collections import Counter

from farandole.report import units
from farandole.report.summary import Name
from farandole.report.templating import fill
from farandole.tune.record import FAILED, RUNNING, TrialRecord, TuneRecord

MOST_TRIALS = 200  # in the table


def sentence(study: TuneRecord) -> tuple[str, ...]:
    """The best trial so far."""
    best = study.best
    if best is None:
        return (f"No trial has come to its end so far, of {study.script}.",)
    so_far = "" if _over(study) >= (study.wanted or 0) else " so far"
    value = units.number(best.value)
    text = f" has the best {study.metric}{so_far}: {value}, with {best.choices_text}."
    return (Name(best.folder), text)


def title(study: TuneRecord) -> str:
    states = Counter(trial.state for trial in study.trials)
    ends = ", ".join(f"{count} {state}" for state, count in states.items())
    of = "" if study.wanted is None else f" of {study.wanted}"
    count = f"{len(study.trials)}{of} trials" + (f": {ends}" if ends else "")
    better = "higher" if study.higher_is_better else "lower"
    about = [count, study.script, f"{better} {study.metric} is better"]
    parts = [(part, isinstance(part, Name)) for part in sentence(study)]
    return fill("title.html", sentence=parts, about=about)


def trials(study: TuneRecord) -> str:
    """The best first."""
    ranked = study.ranked()
    names = list(dict.fromkeys(name for trial in ranked for name in trial.choices))
    heads = ["trial", study.metric, *names, "time", "outcome"]
    rows = [_row(trial, names) for trial in ranked[:MOST_TRIALS]]
    left_out = max(0, len(ranked) - MOST_TRIALS)
    words = ("trial", "outcome", *names)
    return fill("trials.html", heads=heads, rows=rows, words=words, left_out=left_out)


def how_it_was_run(study: TuneRecord) -> str:
    facts = {**study.facts, "workers": str(study.workers)}
    return fill("how_it_was_run.html", common=facts, lanes=[])


def _row(trial: TrialRecord, names: list[str]) -> list[str]:
    chosen = [trial.choices.get(name, "–") for name in names]
    why = f": {trial.problem}" if trial.state == FAILED and trial.problem else ""
    value = units.number(trial.value)
    return [
        trial.folder.removeprefix("trial-"),
        value,
        *chosen,
        units.seconds(trial.seconds),
        trial.state + why,
    ]


def _over(study: TuneRecord) -> int:
    return sum(trial.state != RUNNING for trial in study.trials)
