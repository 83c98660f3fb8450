"""The results of races in a terminal."""

from __future__ import annotations

from collections.abc import Sequence

import click
from rich.console import Console

from farandole.report.lane import Lane
from farandole.report.page import results_of
from farandole.report.reasons import reason
from farandole.report.repeats import placed
from farandole.report.repeats_text import repeats_table
from farandole.report.sections import sentence
from farandole.report.summary import plain, simulation, table
from farandole.report.target import Target


def show(lanes: Sequence[Lane], target: Target | None, console: Console) -> None:
    """The table, and one sentence: who won, by how much, and why."""
    results = results_of(lanes, target, {})
    if results.runs:
        caption = simulation(results) if results.simulated_links else ""
        console.print(repeats_table(placed(results.runs, target), target, caption))
    else:
        console.print(table(lanes, target))
    said = plain(sentence(results))
    click.secho(" ".join(filter(None, (said, reason(results)))), bold=True)
