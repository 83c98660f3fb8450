"""The sections of the page. Each is a small function of the results that returns HTML, or nothing.

To add a section, write such a function and its template, and put the function into the list that
`page.page` is given. Templates escape all text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial

from markupsafe import Markup

from farandole.errors import UserError
from farandole.report import units
from farandole.report.axes import Axis, known_axes
from farandole.report.decisions import decisions
from farandole.report.history import Point
from farandole.report.interactive.charts import charts, memory
from farandole.report.lane import Lane, labels
from farandole.report.plots import curves as plots
from farandole.report.plots import render
from farandole.report.plots.drawing import drawable
from farandole.report.repeats import placed
from farandole.report.repeats_text import TITLES, repeats_headline, rows
from farandole.report.standing import Results, require_metric
from farandole.report.summary import Name, columns, cost_notes, headline, simulation
from farandole.report.templating import fill

Section = Callable[[Results], str]

MOST_OTHER_METRICS = 12
MOST_RAW_ROWS = 200


@dataclass(frozen=True)
class _Warning:
    """A sentence. A lane's name stands before `text`, after `before`."""

    text: str
    lane: str = ""
    before: str = ""


@dataclass(frozen=True)
class _Panel:
    """One metric against time, samples, or what else it costs."""

    metric: str
    drawings: list[Markup]
    gaps: int


@dataclass(frozen=True)
class _Numbers:
    """The logs of a lane as a table. Every `every`th is in it."""

    index: int
    name: str
    logs: int
    every: int
    heads: list[str]
    rows: list[list[str]]


def title(results: Results) -> str:
    starts = [lane.history.start for lane in results.lanes]
    scripts = dict.fromkeys(str(start["script"]) for start in starts if "script" in start)
    count = len(results.runs or results.lanes)
    about = [f"{count} run{'' if count == 1 else 's'}", *scripts]
    if results.target is not None:
        about.append(f"target: {results.target}")
    if results.simulated_links:
        about.append(simulation(results))
    parts = [(part, isinstance(part, Name)) for part in sentence(results)]
    return fill("title.html", sentence=parts, about=about)


def sentence(results: Results) -> tuple[str, ...]:
    """The result, of several seeds if there are several."""
    repeated = repeats_headline(placed(results.runs, results.target), results.target)
    return repeated or headline(results)


def warnings(results: Results) -> str:
    """What the reader must know before believing the numbers."""
    lines = []
    if results.target is not None:
        try:
            require_metric(results.target, [lane.history for lane in results.lanes])
        except UserError as error:
            lines.append(_Warning(str(error)))
    shown = results.runs or results.lanes
    for name, lane in zip(labels(shown), shown, strict=True):
        if lane.outcome == "failed":
            why = f": {lane.problem}" if lane.problem else "."
            text = f" failed after {units.seconds(lane.total_seconds)}{why}"
            lines.append(_Warning(text, name))
        if lane.outcome == "unfinished":
            text = " stopped without writing its end; its last record counts as its end."
            lines.append(_Warning(text, name))
        for damage in lane.history.damage:
            text = f" are damaged. Left out: {damage}"
            lines.append(_Warning(text, name, before="The metrics of "))
    return fill("warnings.html", lines=lines) if lines else ""


def race_table(results: Results) -> str:
    if not results.lanes:
        return ""
    rows = results.standings
    return fill(
        "race_table.html",
        rows=rows,
        columns=columns(results, rows),
        speed_up_in="time to target" if results.target else "samples/s",
        baseline=labels(results.lanes)[0],
        link=results.link,
        cost_notes=cost_notes(results),
        simulation=simulation(results) if results.simulated_links else "",
    )


def repeats(results: Results) -> str:
    """All seeds of each lane; the other tables and the plots have the typical run of each."""
    if not results.runs:
        return ""
    cells = rows(placed(results.runs, results.target))
    return fill("repeats.html", heads=TITLES, rows=cells, runs=len(results.runs))


def goal_curves(results: Results) -> str:
    if results.goal is None:
        return ""
    axes = known_axes(results)
    return fill("goal_curves.html", panel=_panel(results, results.goal.metric, axes))


def costs(results: Results) -> str:
    """Waiting and traffic: where the time went. With its script, the page draws traffic itself."""
    if not any(lane.total_seconds for lane in results.lanes):
        return ""
    waiting = render.svg(lambda: plots.waiting(results), "share of time spent waiting")
    sent = render.svg(lambda: plots.bytes_over_time(results), "bytes sent over time")
    return fill("costs.html", waiting=Markup(waiting), sent=Markup(sent))


def other_metrics(results: Results) -> str:
    """Whatever else the script or a strategy logged, drawn the same way."""
    goal = results.goal.metric if results.goal else None
    names = [name for name in results.metric_names if name != goal]
    if not names:
        return ""
    panels = [_panel(results, name) for name in names[:MOST_OTHER_METRICS]]
    return fill("other_metrics.html", panels=panels, left=len(names) - MOST_OTHER_METRICS)


def how_it_was_run(results: Results) -> str:
    """What all runs share is said once; each run then adds what is its own."""
    if not results.lanes:
        return ""
    of_runs = [_run_facts(lane) for lane in results.lanes]
    shared = dict(set.intersection(*(set(facts.items()) for facts in of_runs)))
    common = {key: text for key, text in of_runs[0].items() if key in shared}
    own = [{key: text for key, text in facts.items() if key not in shared} for facts in of_runs]
    lanes = list(zip(labels(results.lanes), own, strict=True))
    return fill("how_it_was_run.html", common={**results.facts, **common}, lanes=lanes)


def raw_numbers(results: Results) -> str:
    lanes = [
        _numbers(index, name, lane)
        for index, (name, lane) in enumerate(zip(labels(results.lanes), results.lanes, strict=True))
        if lane.history.points
    ]
    return fill("raw_numbers.html", lanes=lanes) if lanes else ""


SECTIONS: tuple[Section, ...] = (
    title,
    warnings,
    repeats,
    race_table,
    charts,
    goal_curves,
    costs,
    decisions,
    memory,
    other_metrics,
    how_it_was_run,
    raw_numbers,
)


def _panel(results: Results, metric: str, axes: Sequence[Axis] = ("time", "samples")) -> _Panel:
    drawings = [
        render.svg(partial(plots.curve, results, metric, axis), f"{metric} against {axis}")
        for axis in axes
    ]
    gaps = sum(
        drawable(point.metrics[metric]) != point.metrics[metric]
        for lane in results.lanes
        for point in lane.history.series(metric)
    )
    return _Panel(metric, [Markup(svg) for svg in drawings], gaps)


def _run_facts(lane: Lane) -> dict[str, str]:
    """What the run said of itself, besides what the race knew of it."""
    start = lane.history.start
    facts = {"command": lane.command} if lane.command else {}
    facts["workers"] = str(lane.workers)
    if not lane.sync and "sync" in start:  # the lane's name does not say it
        facts["sync"] = lane.history.sync
    for key in ("layout", "hosts", "device", "script", "seed", "name"):
        if start.get(key) is not None:
            facts[key] = str(start[key])
    if lane.link is not None:
        facts["link between hosts"] = str(lane.link)
    if lane.simulated_link:
        facts["simulated link between hosts"] = lane.simulated_link
    versions = start.get("versions")
    if isinstance(versions, dict):
        facts["versions"] = ", ".join(f"{name} {version}" for name, version in versions.items())
    if (started := _utc(start.get("unix_time"))) is not None:
        facts["started"] = started
    return facts


def _utc(unix_time: object) -> str | None:
    if not isinstance(unix_time, int | float):
        return None
    try:
        return datetime.fromtimestamp(unix_time, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (ValueError, OverflowError, OSError):
        return None


def _numbers(index: int, name: str, lane: Lane) -> _Numbers:
    names = lane.history.metric_names
    points = lane.history.points
    every = -(-len(points) // MOST_RAW_ROWS)
    kept = [point for at, point in enumerate(points) if at % every == 0 or point is points[-1]]
    with_energy = ["energy (J)"] if lane.energy_joules is not None else []
    heads = ["time (s)", "samples", "steps", "waited (s)", "bytes sent", *with_energy, *names]
    return _Numbers(
        index,
        name,
        len(points),
        every,
        heads,
        [_raw_row(point, names, bool(with_energy)) for point in kept],
    )


def _raw_row(point: Point, names: Sequence[str], with_energy: bool) -> list[str]:
    joules = point.energy_joules
    energy = ["" if joules is None else f"{joules:.6g}"] if with_energy else []
    return [
        f"{point.time_seconds:.3f}",
        str(point.samples),
        str(point.steps),
        f"{point.waited_seconds:.3f}",
        str(point.bytes_sent),
        *energy,
        *(f"{point.metrics[name]:.6g}" if name in point.metrics else "" for name in names),
    ]
