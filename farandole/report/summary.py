"""The race in words, in a terminal table and in `summary.json`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from farandole.report import units
from farandole.report.history import Note
from farandole.report.lane import Lane, Outcome, labels
from farandole.report.repeats import TOO_CLOSE
from farandole.report.standing import Results, Standing
from farandole.report.target import Target

if TYPE_CHECKING:
    from rich.table import Table

MOST_NOTES = 1000  # of a lane, in the page and in `summary.json`; metrics.jsonl has them all

OUTCOME_STYLES: Mapping[Outcome, str] = {  # `ok` goes without saying
    "failed": "bold red",
    "unfinished": "yellow",
    "stopped": "dim",
    "running": "cyan",
    "waiting": "dim",
}


class Name(str):
    """A part of a sentence that is a strategy's name: the page sets it in a typewriter face."""


def headline(results: Results) -> tuple[str, ...]:
    """The result in one sentence, in parts; join them with `plain`."""
    standings = results.standings
    raced = [standing for standing in standings if standing.lane.outcome != "failed"]
    if not raced:
        if len(standings) == 1:
            return (Name(standings[0].label), " failed.")
        return (f"All {len(standings)} runs failed." if standings else "Nothing was raced.",)
    winner = raced[0]
    if winner.seconds_to_target is not None:
        alone = len(raced) == 1 or _too_close(winner, raced[1])
        first = "" if alone else " first"
        return (
            Name(winner.label),
            f" reached {results.target}{first}, in {units.seconds(winner.seconds_to_target)}",
            *_comparison(winner, raced),
            ".",
        )
    if results.goal is None:
        rate = winner.lane.samples_per_second
        if not rate:
            return ("No run logged anything: does the script call run.log(…)?",)
        text = f" took in {units.rate(rate)} samples/s."
        return ("No metric was logged; ", Name(winner.label), text)
    if winner.best is None:
        return (f"No run logged a finite {results.goal.metric}.",)
    value = f"{units.number(winner.best)} after {units.seconds(winner.best_seconds)}"
    if results.target is not None:
        nearest = " came to " if len(raced) == 1 else " came nearest, with "
        return (f"No run reached {results.target}; ", Name(winner.label), nearest, value, ".")
    return (Name(winner.label), f" had the best {results.goal.metric}: {value}.")


def plain(parts: Sequence[str]) -> str:
    return "".join(f"`{part}`" if isinstance(part, Name) else part for part in parts)


def _comparison(winner: Standing, raced: Sequence[Standing]) -> tuple[str, ...]:
    """Against the strategy given first; when that one won, against the runner-up.

    A runner-up too close to tell apart is named as well, whoever is compared with.
    """
    if len(raced) == 1:
        return ()
    runner_up = raced[1]
    rival = runner_up if winner.index == 0 else min(raced, key=lambda row: row.index)
    parts = _against(winner, rival if rival is not winner else runner_up)
    if runner_up is not rival and _too_close(winner, runner_up):
        parts += _against(winner, runner_up)
    return parts


def _against(winner: Standing, rival: Standing) -> tuple[str, ...]:
    ours, theirs = winner.seconds_to_target, rival.seconds_to_target
    assert ours is not None, "only a lane that reached the target is compared"
    if theirs is None:
        return ("; ", Name(rival.label), f" did not reach it (best {units.number(rival.best)})")
    if _too_close(winner, rival):
        text = f" took {units.seconds(theirs)}, too close to call from one run of each"
        return ("; ", Name(rival.label), text)
    if ours == 0:
        return ("; ", Name(rival.label), f" took {units.seconds(theirs)}")
    return (f"; {theirs / ours:.1f}× sooner than ", Name(rival.label))


def _too_close(winner: Standing, rival: Standing) -> bool:
    ours, theirs = winner.seconds_to_target, rival.seconds_to_target
    return ours is not None and theirs is not None and theirs <= TOO_CLOSE * ours


_Shown = tuple[str, str, Callable[[Standing], str]]
"""Title, short title, and the text of a row."""


@dataclass(frozen=True)
class Column:
    """`short` is the title in a terminal, which has 80 characters; without one it is left out."""

    title: str
    short: str
    cells: tuple[str, ...]


def columns(results: Results, rows: Sequence[Standing]) -> tuple[Column, ...]:
    """What the terminal and the page both show, one row for each standing."""
    target, goal = results.target, results.goal
    shown: list[_Shown] = [
        ("strategy", "strategy", lambda row: row.label),
        ("workers", "n", lambda row: str(row.lane.workers)),
        ("outcome", "", lambda row: row.lane.outcome),  # in a terminal, beside the name
    ]
    if target is not None:
        shown.append(
            (f"time to {target}", "to target", lambda row: units.seconds(row.seconds_to_target))
        )
    if goal is not None:
        shown.append((f"best {goal.metric}", "best", lambda row: units.number(row.best)))
    costs = _cost_columns(results)
    shown += costs
    shown += [
        ("speed-up", "speed-up", lambda row: units.times(row.speed_up)),
        ("samples/s", "samples/s", lambda row: units.rate(row.lane.samples_per_second)),
        ("waited", "waited", lambda row: units.seconds(row.lane.waited_seconds)),
        ("waited share", "", lambda row: units.share(row.lane.waited_share)),
        ("sent per rank", "sent", lambda row: units.bytes_count(row.lane.bytes_sent)),
        *_gpu_memory(rows),
        ("start-up", "", lambda row: units.seconds(row.lane.startup_seconds)),
        ("total time", "total", lambda row: units.seconds(row.lane.total_seconds)),
    ]
    # A terminal has 80 characters: what a lane cost takes the place of what is least missed.
    taken = sum(bool(short) for _, short, _ in costs)
    left_out = ("total", "samples/s")[:taken]
    return tuple(
        Column(title, "" if short in left_out else short, tuple(text(row) for row in rows))
        for title, short, text in shown
    )


def _gpu_memory(
    rows: Sequence[Standing],
) -> list[tuple[str, str, Callable[[Standing], str]]]:
    """Only where a lane has used GPUs."""
    if all(row.lane.gpu_peak_bytes is None for row in rows):
        return []
    return [
        (
            "GPU memory, fullest rank",
            "GPU",
            lambda row: units.memory(row.lane.gpu_peak_bytes),
        )
    ]


def _cost_columns(results: Results) -> list[_Shown]:
    """What is not known has no column: it would look like 0."""
    to_target = results.target is not None
    shown: list[_Shown] = []
    if results.prices:
        total = "" if to_target else "cost"
        if to_target:
            shown.append(("cost to target", "cost", lambda row: units.money(row.cost_to_target)))
        shown.append(
            ("cost in all", total, lambda row: units.money(row.lane.cost(row.lane.total_seconds)))
        )
    if results.has_energy:
        total = "" if to_target else "energy"
        if to_target:
            shown.append(
                ("energy to target", "energy", lambda row: units.joules(row.energy_to_target))
            )
        shown.append(("energy in all", total, lambda row: units.joules(row.lane.energy_joules)))
    return shown


def cost_notes(results: Results) -> list[str]:
    """What the columns of costs mean, in the words that the table and the page share."""
    told = []
    if results.prices:
        told.append(f"price of a worker-hour: {' and '.join(map(units.money, results.prices))}")
    sources = (str(lane.history.start.get("energy") or "") for lane in results.lanes)
    if results.has_energy:
        told.append(f"energy: {'; '.join(dict.fromkeys(filter(None, sources)))}")
    elif results.no_energy:
        told.append(f"energy is not measured: {results.no_energy}")
    return told


def table(lanes: Sequence[Lane], target: Target | None = None, *, ranked: bool = True) -> Table:
    """The race for a terminal: best lane first, or, for a live table, in the order given."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    results = Results(tuple(lanes), target)
    rows = results.standings
    if not ranked:
        rows = tuple(sorted(rows, key=lambda row: row.index))
    drawn = Table(box=box.SIMPLE_HEAD, padding=0, caption=Text(_caption(results, rows)))
    drawn.caption_justify = "left"
    shown = [column for column in columns(results, rows) if column.short]
    for column in shown:
        # Only a strategy's name may be folded: a folded number would be misread.
        name = column.short == "strategy"
        justify: Literal["left", "right"] = "left" if name else "right"
        width = 14 if name else None
        drawn.add_column(
            column.short, justify=justify, min_width=width, no_wrap=not name, overflow="fold"
        )
    for at, row in enumerate(rows):
        # Text, not str: a strategy called `[bold]` is a name, not markup.
        name_cell, *numbers = (Text(column.cells[at]) for column in shown)
        if ranked and row.place == 1 and row.lane.outcome != "failed":
            name_cell.stylize("bold")
        done = row.lane.outcome == "stopped" and row.seconds_to_target is not None
        if row.lane.outcome != "ok" and not done:
            name_cell.append(f" {row.lane.outcome}", OUTCOME_STYLES[row.lane.outcome])
        drawn.add_row(name_cell, *numbers)
    return drawn


def _caption(results: Results, rows: Sequence[Standing]) -> str:
    """What the short titles leave out."""
    told = []
    if results.target is not None:
        told.append(f"target: {results.target}")
    elif results.goal is not None:
        told.append(f"best: of {results.goal.metric}")
    if results.lanes:
        told.append(f"speed-up: over {labels(results.lanes)[0]}")
    if results.link is not None:
        told.append(f"link between hosts: {results.link}")
    if results.simulated_links:
        told.append(simulation(results))
    told += cost_notes(results)
    if any(row.lane.startup_seconds is not None for row in rows):
        seconds = (units.seconds(row.lane.startup_seconds) for row in rows)
        told.append(f"start-up before, until fd.init() was done: {', '.join(seconds)}")
    return "; ".join(told)


def simulation(results: Results) -> str:
    """That a link is not real, in the words that the table and the page share."""
    return f"SIMULATED link between pretended hosts: {'; '.join(results.simulated_links)}"


def summary_json(results: Results, more: Mapping[str, Any] | None = None) -> str:
    """`summary.json`: the same numbers for programs, unrounded, best lane first, and `more`."""
    target, goal = results.target, results.goal
    summary = {
        "format": 1,
        "headline": plain(headline(results)),
        "target": None
        if target is None
        else {
            "metric": target.metric,
            "value": target.value,
            "higher_is_better": target.higher_is_better,
        },
        "simulated": bool(results.simulated_links),
        "ranked_by": None if goal is None else goal.metric,
        "lanes": [_lane_record(row) for row in results.standings],
        "facts": dict(results.facts),
        **(more or {}),
    }
    return json.dumps(summary, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def _lane_record(row: Standing) -> dict[str, Any]:
    lane = row.lane
    return {
        "place": row.place,
        "given": row.index + 1,
        "label": row.label,
        "sync": lane.sync or None,
        "layout": lane.layout or None,
        "workers": lane.workers,
        "link": None if lane.link is None else asdict(lane.link),
        "simulated_link": lane.simulated_link or None,
        "seed": lane.seed,
        "outcome": lane.outcome,
        "problem": lane.problem,
        "command": lane.command,
        "seconds_to_target": row.seconds_to_target,
        "best": row.best,
        "best_seconds": row.best_seconds,
        "speed_up": units.jsonable(row.speed_up),
        "samples": lane.history.last.samples,
        "samples_per_second": units.jsonable(lane.samples_per_second),
        "waited_seconds": lane.waited_seconds,
        "waited_share": units.jsonable(lane.waited_share),
        "bytes_sent": lane.bytes_sent,
        "gpu_peak_bytes": list(lane.history.gpu_peak_bytes),
        "energy_joules": lane.energy_joules,
        "energy_joules_to_target": row.energy_to_target,
        "price_per_worker_hour": lane.price,
        "cost": lane.cost(lane.total_seconds),
        "cost_to_target": row.cost_to_target,
        "startup_seconds": lane.startup_seconds,
        "total_seconds": lane.total_seconds,
        "damage": list(lane.history.damage),
        "notes": [_note_record(note) for note in lane.history.notes[-MOST_NOTES:]],
        "notes_left_out": max(0, len(lane.history.notes) - MOST_NOTES),
    }


def _note_record(note: Note) -> dict[str, Any]:
    values = {
        name: value if isinstance(value, str) else units.jsonable(value)
        for name, value in note.values.items()
    }
    return {"time": note.time_seconds, "steps": note.steps, "values": values}
