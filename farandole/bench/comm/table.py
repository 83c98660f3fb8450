"""The rows as they come, one line each: in a terminal, in a file, through any launcher.

No line is ever redrawn, so the lines look the same where a launcher passes them on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import IO

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from farandole.bench.comm.plan import AUTO, BenchPlan
from farandole.bench.comm.rows import Row
from farandole.bench.comm.sizes import format_size
from farandole.comm.transports.base import NATIVE
from farandole.report import units
from farandole.schedule import ALGORITHMS

_LEFT = ("algorithm", "by")


class Printer:
    """Prints a heading, then rows under it."""

    def __init__(self, plan: BenchPlan, file: IO[str] | None = None) -> None:
        names = [*plan.algorithms]
        if AUTO in names:
            names += [f"{AUTO}: {name}" for name in (NATIVE, *ALGORITHMS)]
        self._widths = {
            "size": max(7, *(len(format_size(size)) for size in plan.sizes)),
            "algorithm": max(len(name) for name in (*names, "algorithm")),
            "by": 9,
            "time": 7,
            "IQR": 5,
            "bus": 9,
            **{f"vs {name}": 3 + len(name) for name in plan.against},
        }
        width = sum(self._widths.values()) + len(self._widths)
        # Both, or rich takes a terminal that says little about itself to have 80 columns.
        self._console = Console(file=file, highlight=False, width=width, height=25)

    def say(self, text: str) -> None:
        self._console.print(text, soft_wrap=True, markup=False)

    def heading(self) -> None:
        self._line([Text(title, style="bold") for title in self._widths])

    def rows(self, rows: Sequence[Row]) -> None:
        for row in rows:
            auto = row.algorithm == AUTO
            ratios = [
                Text(_times(ratio), style="green" if ratio >= 1 else "red")
                for ratio in row.ratios.values()
            ]
            self._line(
                [
                    Text(format_size(row.bytes)),
                    Text(f"{AUTO}: {row.chosen}" if auto else row.algorithm),
                    Text(row.transport),
                    Text(short_seconds(row.time.median), style="bold")
                    if row.correct
                    else Text("WRONG", style="bold red"),
                    Text(f"{100 * row.time.spread:.0f} %"),
                    Text(f"{units.bytes_count(row.bus_bytes_per_second)}/s"),
                    *ratios,
                ]
            )

    def _line(self, cells: Sequence[Text]) -> None:
        columns = [
            Column(width=width, justify="left" if title in _LEFT else "right", no_wrap=True)
            for title, width in self._widths.items()
        ]
        line = Table(*columns, box=None, show_header=False, padding=(0, 1, 0, 0))
        line.add_row(*cells)
        self._console.print(line)


def short_seconds(value: float) -> str:
    """Three digits, in the unit that fits: 62.1 µs, 1.85 ms, 2.00 s."""
    for unit, scale in (("µs", 1e6), ("ms", 1e3)):
        if value * scale < 999.5:
            return f"{_three_digits(value * scale)} {unit}"
    return f"{_three_digits(value)} s"


def _times(ratio: float) -> str:
    return units.times(ratio) if ratio >= 0.1 else f"{ratio:.1g}×"


def _three_digits(value: float) -> str:
    return f"{value:.{2 if value < 9.995 else 1 if value < 99.95 else 0}f}"
