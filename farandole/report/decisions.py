"""The section on strategies that adapt: what they changed, when, and why."""

from __future__ import annotations

import math
from html import escape

from farandole.report.history import Note
from farandole.report.lane import Lane, labels
from farandole.report.markup import cell, figure, swatch
from farandole.report.plots import adaptation, render
from farandole.report.standing import Results
from farandole.report.summary import MOST_NOTES

WORDS = ("phase", "why")


def decisions(results: Results) -> str:
    """Periods and phases over time, and each lane's decisions in a table."""
    if not any(lane.history.notes for lane in results.lanes):
        return ""
    figures = ""
    if adaptation.has_steps(results):
        figures += figure(render.svg(lambda: adaptation.periods(results), "periods over time"))
    if adaptation.has_phases(results):
        figures += figure(render.svg(lambda: adaptation.phases(results), "phases over time"))
    tables = "".join(
        f"<details><summary>{swatch(index)}<code>{escape(name)}</code>, "
        f"{_counted(len(lane.history.notes))}</summary>{_table(lane)}</details>"
        for index, (name, lane) in enumerate(zip(labels(results.lanes), results.lanes, strict=True))
        if lane.history.notes
    )
    return (
        '<section><h2>How the strategies adapted</h2><p class="note">The period is the number of '
        "steps between exchanges across ranks. The wait is the number of steps that an exchange "
        f'may take before it is merged.{_gaps(results)}</p><div class="pair">{figures}</div>'
        f"{tables}</section>"
    )


def _counted(decisions: int) -> str:
    return "1 decision" if decisions == 1 else f"{decisions} decisions"


def _gaps(results: Results) -> str:
    gaps = sum(
        math.isnan(adaptation.steps_count(note.values[key]))
        for lane in results.lanes
        for note in lane.history.notes
        for key in ("period", "wait")
        if key in note.values
    )
    return f" {gaps} values could not be drawn: no number of steps." if gaps else ""


def _table(lane: Lane) -> str:
    notes = lane.history.notes
    named = dict.fromkeys(name for note in notes[-MOST_NOTES:] for name in note.values)
    names = [*(name for name in named if name != "why"), *(["why"] if "why" in named else [])]
    head = "".join(cell("th", escape(name), name in WORDS) for name in names)
    body = "".join(f"<tr>{_row(note, names)}</tr>" for note in notes[-MOST_NOTES:])
    note = (
        f'<p class="note">The last {MOST_NOTES} of {len(notes)} decisions; '
        "all are in metrics.jsonl.</p>"
        if len(notes) > MOST_NOTES
        else ""
    )
    return (
        f'{note}<div class="scroll"><table><thead><tr><th>time (s)</th><th>step</th>{head}</tr>'
        f"</thead><tbody>{body}</tbody></table></div>"
    )


def _row(note: Note, names: list[str]) -> str:
    cells = "".join(cell("td", _shown(note, name), name in WORDS) for name in names)
    return f"<td>{note.time_seconds:.3f}</td><td>{note.steps}</td>{cells}"


def _shown(note: Note, name: str) -> str:
    value = note.values.get(name, "")
    return escape(value) if isinstance(value, str) else f"{value:.6g}"
