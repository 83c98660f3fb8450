"""The section on strategies that adapt: what they changed, when, and why."""

from __future__ import annotations

import math
from dataclasses import dataclass

from markupsafe import Markup

from farandole.report.history import Note
from farandole.report.lane import Lane, labels
from farandole.report.plots import adaptation, render
from farandole.report.standing import Results
from farandole.report.summary import MOST_NOTES
from farandole.report.templating import fill


@dataclass(frozen=True)
class _Decisions:
    """The decisions of a lane; the last of them as a table."""

    index: int
    name: str
    count: int
    heads: list[str]
    rows: list[list[str]]


def decisions(results: Results) -> str:
    """Periods and phases over time, and each lane's decisions in a table."""
    if not any(lane.history.notes for lane in results.lanes):
        return ""
    periods, phases = [], []
    if adaptation.has_steps(results):
        periods.append(render.svg(lambda: adaptation.periods(results), "periods over time"))
    if adaptation.has_phases(results):
        phases.append(render.svg(lambda: adaptation.phases(results), "phases over time"))
    lanes = [
        _decisions(index, name, lane)
        for index, (name, lane) in enumerate(zip(labels(results.lanes), results.lanes, strict=True))
        if lane.history.notes
    ]
    return fill(
        "decisions.html",
        periods=[Markup(svg) for svg in periods],  # the script draws them too
        phases=[Markup(svg) for svg in phases],
        gaps=_gaps(results),
        lanes=lanes,
        most=MOST_NOTES,
    )


def _gaps(results: Results) -> int:
    return sum(
        math.isnan(adaptation.steps_count(note.values[key]))
        for lane in results.lanes
        for note in lane.history.notes
        for key in ("period", "wait")
        if key in note.values
    )


def _decisions(index: int, name: str, lane: Lane) -> _Decisions:
    notes = lane.history.notes
    named = dict.fromkeys(key for note in notes[-MOST_NOTES:] for key in note.values)
    keys = [*(key for key in named if key != "why"), *(["why"] if "why" in named else [])]
    rows = [
        [f"{note.time_seconds:.3f}", str(note.steps), *(_shown(note, key) for key in keys)]
        for note in notes[-MOST_NOTES:]
    ]
    return _Decisions(index, name, len(notes), ["time (s)", "step", *keys], rows)


def _shown(note: Note, key: str) -> str:
    value = note.values.get(key, "")
    return value if isinstance(value, str) else f"{value:.6g}"
