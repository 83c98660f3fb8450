"""What the page's own script draws: the numbers of all lanes, as JSON in the page.

Only numbers and text: nothing here is HTML, and the script never takes it for HTML. Long runs are
thinned, so that a page stays small however long a run was.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from markupsafe import Markup

from farandole.report import axes
from farandole.report.axes import Axis, spent
from farandole.report.history import MOST, Counters, Note, Point
from farandole.report.interactive.timeline import read_timeline
from farandole.report.lane import Lane, labels
from farandole.report.plots import palette
from farandole.report.standing import Results

MOST_POINTS = 800  # of a lane
MOST_METRICS = 14
LARGEST_DRAWN = 1e100

_COUNTERS = {"sent": ("sent by rank 0", "bytes"), "waited": ("waited by rank 0", "time")}
_STEPS = {"period": "period (steps between exchanges)", "wait": "wait (steps of an exchange)"}


def page_data(results: Results) -> dict[str, Any]:
    """Everything the script needs, in plain JSON."""
    known = axes.known_axes(results)
    target = results.target
    return {
        "axes": [
            {"key": axis, "title": axes.TITLES[axis], "name": axes.title(axis, results)}
            for axis in known
        ],
        "target": None
        if target is None
        else {"metric": target.metric, "value": target.value, "text": str(target)},
        "panels": _panels(results),
        "lanes": [
            _lane(index, name, lane, results, known)
            for index, (name, lane) in enumerate(
                zip(labels(results.lanes), results.lanes, strict=True)
            )
        ],
    }


def embedded(data: object) -> Markup:
    """As the content of a `<script>` that is not run: no text in it can end that element."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)


def _panels(results: Results) -> list[dict[str, Any]]:
    """What is drawn, the goal first. All but the goal and the periods is folded."""
    goal = results.goal.metric if results.goal else None
    ordered = sorted(results.metric_names, key=lambda name: name != goal)
    panels = [_panel("metric", name, name, "number", name == goal) for name in ordered]
    panels = panels[:MOST_METRICS]
    if any(lane.history.points for lane in results.lanes):
        panels += [_panel("counter", key, *shown, False) for key, shown in _COUNTERS.items()]
    for key, title in _STEPS.items():
        if any(key in note.values for lane in results.lanes for note in lane.history.notes):
            panels.append(_panel("note", key, title, "number", key == "period"))
    return panels


def _panel(kind: str, key: str, title: str, unit: str, is_open: bool) -> dict[str, Any]:
    return {"kind": kind, "key": key, "title": title, "format": unit, "open": is_open}


def _lane(
    index: int, name: str, lane: Lane, results: Results, known: Sequence[Axis]
) -> dict[str, Any]:
    history, target = lane.history, results.target
    met = target.first_met(history) if target else None
    points = _thinned(history.points, met)
    notes = history.notes[-MOST_POINTS:]
    reached = None
    if met is not None and target is not None:
        reached = {**_spent(lane, met, known), "value": met.metrics[target.metric]}
    return {
        "name": name,
        "colour": palette.shade(index).name,
        "dash": palette.dash(index),
        "outcome": lane.outcome,
        "problem": lane.problem,
        "logs": {
            "across": _across(lane, points, known),
            "metric": {
                metric: [_number(point.metrics.get(metric)) for point in points]
                for metric in history.metric_names
            },
            "counter": {
                "sent": [point.bytes_sent for point in points],
                "waited": [_number(point.waited_seconds) for point in points],
            },
        },
        "notes": {
            "across": _across(lane, notes, known),
            "note": {key: _held(notes, key) for key in _STEPS},
        },
        "last": _spent(lane, history.last, known),
        "reached": reached,
        "timeline": read_timeline(lane),
    }


def _thinned(points: Sequence[Point], met: Point | None) -> list[Point]:
    """Every so many, and the last, and the one that met the target."""
    every = -(-len(points) // MOST_POINTS) or 1
    return [p for at, p in enumerate(points) if at % every == 0 or p is points[-1] or p is met]


def _across(
    lane: Lane, counted: Sequence[Counters], known: Sequence[Axis]
) -> dict[Axis, list[float | None]]:
    return {axis: [_number(spent(lane, axis, at)) for at in counted] for axis in known}


def _spent(lane: Lane, counters: Counters, known: Sequence[Axis]) -> dict[str, float | None]:
    return {axis: _number(spent(lane, axis, counters)) for axis in known}


def _held(notes: Sequence[Note], key: str) -> list[float | None]:
    """A decision holds until the next one. What is no number of steps is a gap."""
    held: list[float | None] = []
    for note in notes:
        value = note.values.get(key, held[-1] if held else None)
        is_count = isinstance(value, int | float) and 0 <= value < MOST
        held.append(float(value) if is_count and value is not None else None)
    return held


def _number(value: float | None) -> float | None:
    """None, which is a gap, where it cannot be drawn: not finite, or out of all bounds."""
    return value if value is not None and abs(value) < LARGEST_DRAWN else None
