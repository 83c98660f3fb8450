"""The sections of the page. Each is a small function of the results that returns HTML, or nothing.

To add a panel, write such a function and put it into the list that `page.page` is given. All
text that came from outside goes through `escape`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from html import escape

from farandole.errors import UserError
from farandole.report import units
from farandole.report.decisions import decisions
from farandole.report.history import Point
from farandole.report.lane import Lane, labels
from farandole.report.markup import cell, figure, swatch
from farandole.report.plots import curves as plots
from farandole.report.plots import render
from farandole.report.plots.drawing import drawable
from farandole.report.standing import Results, require_metric
from farandole.report.summary import Name, columns, headline

Section = Callable[[Results], str]

MOST_OTHER_METRICS = 12
MOST_RAW_ROWS = 200


def title(results: Results) -> str:
    sentence = "".join(
        f"<code>{escape(part)}</code>" if isinstance(part, Name) else escape(part)
        for part in headline(results)
    )
    starts = [lane.history.start for lane in results.lanes]
    scripts = dict.fromkeys(str(start["script"]) for start in starts if "script" in start)
    about = [f"{len(results.lanes)} run{'' if len(results.lanes) == 1 else 's'}", *scripts]
    if results.target is not None:
        about.append(f"target: {results.target}")
    return f"<header><h1>{sentence}</h1><p>{escape(' · '.join(about))}</p></header>"


def warnings(results: Results) -> str:
    """What the reader must know before believing the numbers."""
    lines = []
    if results.target is not None:
        try:
            require_metric(results.target, [lane.history for lane in results.lanes])
        except UserError as error:
            lines.append(escape(str(error)))
    for name, lane in zip(labels(results.lanes), results.lanes, strict=True):
        code = f"<code>{escape(name)}</code>"
        if lane.outcome == "failed":
            why = f": {escape(lane.problem)}" if lane.problem else "."
            lines.append(f"{code} failed after {units.seconds(lane.total_seconds)}{why}")
        if lane.outcome == "unfinished":
            lines.append(
                f"{code} stopped without writing its end; its last record counts as its end."
            )
        for damage in lane.history.damage:
            lines.append(f"The metrics of {code} are damaged. Left out: {escape(damage)}")
    return "".join(f'<p class="warning">{line}</p>' for line in lines)


def race_table(results: Results) -> str:
    if not results.lanes:
        return ""
    rows = results.standings
    shown = columns(results, rows)
    words = ("strategy", "outcome")
    head = "".join(cell("th", escape(column.title), column.title in words) for column in shown)
    body = ""
    for at, row in enumerate(rows):
        won = row.place == 1 and row.lane.outcome != "failed"
        body += '<tr class="first">' if won else "<tr>"
        for column in shown:
            heading, text = column.title, escape(column.cells[at])
            if heading == "strategy":
                text = f'<span class="strategy">{swatch(row.index)}<code>{text}</code></span>'
            if heading == "outcome" and row.lane.outcome == "failed":
                text = f'<span class="failed">{text}</span>'
            body += cell("td", text, heading in words)
        body += "</tr>"
    over = "time to target" if results.target else "samples/s"
    note = (
        "Best first. Time to target is the time of the first log that meets it. "
        f"Speed-up is in {over}, over <code>{escape(labels(results.lanes)[0])}</code>. "
        "Waiting and bytes sent are those of rank 0. Samples count all workers."
    )
    table = f'<table class="race"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'
    return f'<section><div class="scroll">{table}</div><p class="note">{note}</p></section>'


def goal_curves(results: Results) -> str:
    if results.goal is None:
        return ""
    metric = results.goal.metric
    return f"<section><h2>{escape(metric)}</h2>{_pair(results, metric)}</section>"


def costs(results: Results) -> str:
    """Waiting and traffic: where the time went."""
    if not any(lane.total_seconds for lane in results.lanes):
        return ""
    waiting = figure(render.svg(lambda: plots.waiting(results), "share of time spent waiting"))
    sent = figure(render.svg(lambda: plots.bytes_over_time(results), "bytes sent over time"))
    return f'<section><h2>Waiting and traffic</h2><div class="pair">{waiting}{sent}</div></section>'


def other_metrics(results: Results) -> str:
    """Whatever else the script or a strategy logged, drawn the same way."""
    goal = results.goal.metric if results.goal else None
    names = [name for name in results.metric_names if name != goal]
    if not names:
        return ""
    panels = "".join(
        f"<details><summary>{escape(name)}</summary>{_pair(results, name)}</details>"
        for name in names[:MOST_OTHER_METRICS]
    )
    left = len(names) - MOST_OTHER_METRICS
    if left > 0:
        panels += f'<p class="note">{left} more are in metrics.jsonl and not drawn here.</p>'
    return f"<section><h2>Other metrics</h2>{panels}</section>"


def how_it_was_run(results: Results) -> str:
    """What all runs share is said once; each run then adds what is its own."""
    if not results.lanes:
        return ""
    of_runs = [_run_facts(lane) for lane in results.lanes]
    shared = dict(set.intersection(*(set(facts.items()) for facts in of_runs)))
    common = {key: text for key, text in of_runs[0].items() if key in shared}
    parts = [_facts({**results.facts, **common})]
    for index, (name, facts) in enumerate(zip(labels(results.lanes), of_runs, strict=True)):
        own = {key: text for key, text in facts.items() if key not in shared}
        if own:
            parts.append(f"<h3>{swatch(index)}<code>{escape(name)}</code></h3>{_facts(own)}")
    return f"<section><h2>How it was run</h2>{''.join(parts)}</section>"


def raw_numbers(results: Results) -> str:
    parts = [
        f"<details><summary>{swatch(index)}<code>{escape(name)}</code>, "
        f"{len(lane.history.points)} logs</summary>{_raw_table(lane)}</details>"
        for index, (name, lane) in enumerate(zip(labels(results.lanes), results.lanes, strict=True))
        if lane.history.points
    ]
    return f"<section><h2>Numbers</h2>{''.join(parts)}</section>" if parts else ""


SECTIONS: tuple[Section, ...] = (
    title,
    warnings,
    race_table,
    goal_curves,
    costs,
    decisions,
    other_metrics,
    how_it_was_run,
    raw_numbers,
)


def _pair(results: Results, metric: str) -> str:
    """One metric against time, and against samples."""
    by_time = render.svg(lambda: plots.curve(results, metric, "time"), f"{metric} against time")
    by_samples = render.svg(
        lambda: plots.curve(results, metric, "samples"), f"{metric} against samples"
    )
    gaps = sum(
        drawable(point.metrics[metric]) != point.metrics[metric]
        for lane in results.lanes
        for point in lane.history.series(metric)
    )
    note = f'<p class="note">{gaps} values could not be drawn: not finite.</p>' if gaps else ""
    return f'<div class="pair">{figure(by_time)}{figure(by_samples)}</div>{note}'


def _facts(facts: Mapping[str, str]) -> str:
    rows = "".join(f"<dt>{escape(key)}</dt><dd>{escape(text)}</dd>" for key, text in facts.items())
    return f"<dl>{rows}</dl>"


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


def _raw_table(lane: Lane) -> str:
    names = lane.history.metric_names
    points = lane.history.points
    every = -(-len(points) // MOST_RAW_ROWS)
    kept = [point for at, point in enumerate(points) if at % every == 0 or point is points[-1]]
    counters = ("time (s)", "samples", "steps", "waited (s)", "bytes sent")
    head = "".join(f"<th>{escape(name)}</th>" for name in (*counters, *names))
    body = "".join(f"<tr>{_raw_row(point, names)}</tr>" for point in kept)
    note = (
        f'<p class="note">Every {every}th of {len(points)} logs; all are in metrics.jsonl.</p>'
        if every > 1
        else ""
    )
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f'{note}<div class="scroll">{table}</div>'


def _raw_row(point: Point, names: Sequence[str]) -> str:
    cells = [
        f"{point.time_seconds:.3f}",
        str(point.samples),
        str(point.steps),
        f"{point.waited_seconds:.3f}",
        str(point.bytes_sent),
        *(f"{point.metrics[name]:.6g}" if name in point.metrics else "" for name in names),
    ]
    return "".join(f"<td>{cell}</td>" for cell in cells)
