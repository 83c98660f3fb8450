"""Lanes with several seeds in words, in a table and in `summary.json`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from farandole.report import units
from farandole.report.repeats import Placed, certainly_before
from farandole.report.summary import Name
from farandole.report.target import Target

if TYPE_CHECKING:
    from rich.table import Table

TITLES = ("place", "strategy", "n", "to target", "95 % interval", "from – to", "reached", "first")


def rows(placed: Sequence[Placed]) -> list[list[str]]:
    """One for each lane, under `TITLES`."""
    return [
        [
            f"{row.place}{'=' if row.tied else ''}",
            row.repeats.label,
            str(row.repeats.runs[0].workers),
            _seconds(row.repeats.median_seconds),
            _range(*row.repeats.interval_seconds),
            _range(min(row.repeats.seconds), max(row.repeats.seconds)),
            f"{row.repeats.reached} of {len(row.repeats.runs)}",
            str(row.first),
        ]
        for row in placed
    ]


def repeats_table(placed: Sequence[Placed], target: Target | None, caption: str = "") -> Table:
    """For a terminal."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    told = [f"target: {target}"] if target else []
    told.append("medians over the seeds; lanes with = are tied: their order is not certain")
    text = Text("; ".join([*told, *filter(None, [caption])]))
    drawn = Table(box=box.SIMPLE_HEAD, padding=0, caption=text)
    drawn.caption_justify = "left"
    for title in TITLES:
        is_name = title == "strategy"
        drawn.add_column(
            title,
            justify="left" if is_name else "right",
            no_wrap=not is_name,
            min_width=14 if is_name else None,
            overflow="fold",
        )
    for cells in rows(placed):
        drawn.add_row(*map(Text, cells))
    return drawn


def repeats_headline(placed: Sequence[Placed], target: Target | None) -> tuple[str, ...]:
    """The result in one sentence, in parts."""
    if target is None or not placed or not placed[0].repeats.reached:
        return ()
    winner = placed[0].repeats
    if not math.isfinite(winner.median_seconds):
        most = f"{winner.reached} of {len(winner.runs)} runs"
        return (
            "No lane reached ",
            f"{target} in most runs; ",
            Name(winner.label),
            f" did in {most}.",
        )
    tied = [row.repeats for row in placed[1:] if row.place == placed[0].place]
    seconds = units.seconds(winner.median_seconds)
    of_runs = f"the median of {len(winner.runs)} runs"
    if tied:
        names: list[str] = [Name(winner.label)]
        for other in tied:
            names += [", ", Name(other.label)]
        return (*names, f" are tied: {target} after {seconds} and more ({of_runs}).")
    told: list[str] = [Name(winner.label), f" reached {target} first, in {seconds} ({of_runs})"]
    if len(placed) > 1:
        second = placed[1].repeats
        assert certainly_before(winner, second)
        if math.isfinite(second.median_seconds):
            times = second.median_seconds / max(winner.median_seconds, 1e-9)
            told += [f"; {times:.1f}× sooner than ", Name(second.label)]
        else:
            told += ["; ", Name(second.label), " did not reach it in most runs"]
    return (*told, ".")


def repeats_json(placed: Sequence[Placed]) -> list[dict[str, Any]]:
    return [
        {
            "place": row.place,
            "tied": row.tied,
            "label": row.repeats.label,
            "workers": row.repeats.runs[0].workers,
            "runs": len(row.repeats.runs),
            "reached": row.repeats.reached,
            "first": row.first,
            "median_seconds_to_target": _number(row.repeats.median_seconds),
            "interval_95_seconds": [_number(end) for end in row.repeats.interval_seconds],
            "median_best": row.repeats.median_value,
            "seeds": [
                {"seed": run.seed, "outcome": run.outcome, "seconds_to_target": _number(seconds)}
                for run, seconds in zip(row.repeats.runs, row.repeats.seconds, strict=True)
            ],
        }
        for row in placed
    ]


def _range(low: float, high: float) -> str:
    """One dash where neither is known."""
    texts = [_seconds(low), _seconds(high)]
    return " – ".join(texts) if texts != ["–", "–"] else "–"


def _seconds(value: float) -> str:
    return units.seconds(value if math.isfinite(value) else None)


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None
