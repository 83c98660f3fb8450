"""The marks all plots are made of: a lane's line, the spots on it, and the legend that names them.

Every mark carries a matplotlib label, `lane 3`, `reached`, `failed` or `wait`; the legend is made
from the labels it finds, so a plot need not tell it what was drawn.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from farandole.report.lane import labels
from farandole.report.plots import palette
from farandole.report.plots.palette import INK
from farandole.report.standing import Results

MARKS_ON_A_LINE = 6
LONGEST_LABEL = 36
CHARACTERS_PER_INCH = 13  # in the legend, wide letters and keys included
LEGEND_ROW_INCHES = 0.21
_TORN_OPTION = re.compile("[^,:/ ]*…[^,:/ ]*")  # what a cut leaves of the options on its sides
LARGEST_DRAWN = 1e100  # beyond it the arithmetic of axes overflows; such a value is a gap


def new_figure(width_inches: float, height_inches: float) -> Figure:
    return Figure((width_inches, height_inches), layout="constrained")


def line(axes: Axes, index: int, across: Sequence[float], heights: Sequence[float]) -> None:
    """The curve of the lane at `index`."""
    # Few marks, not at the same places in all lanes, so that curves that coincide show through.
    spacing = max(1, len(across) // MARKS_ON_A_LINE)
    axes.plot(
        across,
        heights,
        color=palette.shade(index).light,
        linestyle=palette.dash(index),
        marker=palette.mark(index),
        markevery=(index % spacing, spacing),
        markersize=5,
        linewidth=1.8,
        zorder=3,
        label=f"lane {index}",
    )


def reached_spot(axes: Axes, index: int, across: float, height: float) -> None:
    """A star in the lane's colour: here it met the target."""
    axes.plot(
        [across],
        [height],
        marker="*",
        markersize=13,
        markeredgewidth=0.8,
        markeredgecolor=INK.light,
        color=palette.shade(index).light,
        linestyle="none",
        zorder=5,
        clip_on=False,
        label="reached",
    )


def failed_spot(axes: Axes, across: float, height: float) -> None:
    """A cross: the lane got this far and no further."""
    axes.plot(
        [across],
        [height],
        marker="x",
        markersize=9,
        markeredgewidth=2.2,
        color=INK.light,
        linestyle="none",
        zorder=5,
        clip_on=False,
        label="failed",
    )


def legend(figure: Figure, results: Results) -> None:
    """Above the plots, where it covers no curve; the figure grows by the room it takes."""
    marks = {str(mark.get_label()): mark for axes in figure.axes for mark in axes.get_lines()}
    entries = [
        (marks[f"lane {index}"], name)
        for index, name in enumerate(short_labels(results))
        if f"lane {index}" in marks
    ]
    if "reached" in marks:
        star = Line2D([], [], color=INK.light, marker="*", markersize=10, linestyle="none")
        entries.append((star, "target reached"))
    if "failed" in marks:
        entries.append((marks["failed"], "failed"))
    if "wait" in marks:
        entries.append((Line2D([], [], color=INK.light, linestyle=":", linewidth=1.2), "wait"))
    if not entries:
        return
    longest = max(len(name) for _, name in entries)
    across = max(1, int(figure.get_figwidth() * CHARACTERS_PER_INCH / (longest + 7)))
    rows = -(-len(entries) // across)
    figure.set_figheight(figure.get_figheight() + rows * LEGEND_ROW_INCHES)
    # Matplotlib drops entries whose name begins with "_", so the names are put in afterwards.
    drawn = figure.legend(
        [mark for mark, _ in entries],
        ["x" * len(name) for _, name in entries],
        loc="outside upper left",
        ncols=min(across, len(entries)),
        frameon=False,
        labelcolor=INK.light,
    )
    for text, (_, name) in zip(drawn.get_texts(), entries, strict=True):
        text.set_parse_math(False)
        text.set_text(name)


def time_unit(results: Results) -> tuple[str, float]:
    """The unit in which the longest lane is easy to read, and its seconds."""
    longest = max((lane.total_seconds for lane in results.lanes), default=0.0)
    if longest <= 300:
        return "seconds", 1.0
    return ("minutes", 60.0) if longest <= 3 * 3600 else ("hours", 3600.0)


def drawable(value: float) -> float:
    """The value, or NaN, which matplotlib leaves out, where it cannot be drawn."""
    return value if abs(value) < LARGEST_DRAWN else math.nan


def label_text(text: str, head: int = LONGEST_LABEL // 2 - 1) -> str:
    """One line, no control characters, not wider than a figure can bear.

    What is too long loses what follows its first `head` characters: by default its middle, for
    the ends are where two settings of a strategy differ.
    """
    clean = "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)
    if len(clean) <= LONGEST_LABEL:
        return clean
    return f"{clean[:head]}…{clean[len(clean) - (LONGEST_LABEL - 1 - head) :]}"


def short_labels(results: Results) -> list[str]:
    """The lanes' labels as `label_text` has them, cut where what is left whole still differs.

    Layouts have many options, so two of them may well differ in the middle only.
    """
    names = labels(results.lanes)
    middle = LONGEST_LABEL // 2 - 1
    for head in sorted(range(LONGEST_LABEL), key=lambda at: abs(at - middle)):
        shown = [label_text(name, head) for name in names]
        if len({_TORN_OPTION.sub("…", text) for text in shown}) == len(names):
            return shown
    return [label_text(f"{number}: {name}") for number, name in enumerate(names, start=1)]
