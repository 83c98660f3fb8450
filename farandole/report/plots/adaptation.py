"""How strategies adapted: their periods as steps over time, and their phases as bars.

A decision holds until the next one, so nothing is drawn as a slope between two decisions, and the
last one reaches to the end of its lane. A note may lack a value: then the one before still holds.
What is no number of steps (not finite, negative, text) is a gap up to the next decision.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator, StrMethodFormatter
from matplotlib.transforms import offset_copy

from farandole.report import units
from farandole.report.history import MOST
from farandole.report.lane import Lane
from farandole.report.plots import drawing, palette
from farandole.report.plots.drawing import label_text
from farandole.report.plots.palette import INK
from farandole.report.standing import Results

SPAN_FOR_LOG = 4.0
POINTS_APART = 1.8
TINTS = (0.10, 0.24, 0.38)  # of the lane's colour, light enough to read a name on
BAR_HEIGHT = 0.48  # of a row: above the bar there is room for a name that is wider than its phase
BRIEF = 1 / 1000  # of the time axis: less than a pixel


@dataclass(frozen=True)
class Span:
    """A value and the seconds from and to which it held."""

    value: float | str
    begin: float
    end: float


def spans(lane: Lane, key: str) -> list[Span]:
    """What `key` was from when to when. A decision that changed nothing begins no new span."""
    found: list[Span] = []
    for note in lane.history.notes:
        value = note.values.get(key)
        if value is None or (found and found[-1].value == value):
            continue
        if found:
            found[-1] = replace(found[-1], end=note.time_seconds)
        found.append(Span(value, note.time_seconds, end_seconds(lane)))
    return found


def end_seconds(lane: Lane) -> float:
    """Of the lane; of its last decision where a resumed run ended before one that was undone."""
    return max(counters.time_seconds for counters in (lane.history.last, *lane.history.notes[-1:]))


def steps_count(value: float | str) -> float:
    """The value, or NaN where it is no number of steps."""
    return value if not isinstance(value, str) and 0 <= value < MOST else math.nan


def has_steps(results: Results) -> bool:
    """Whether `periods` has anything to draw."""
    return any(
        not math.isnan(steps_count(span.value))
        for lane in results.lanes
        for key in ("period", "wait")
        for span in spans(lane, key)
    )


def has_phases(results: Results) -> bool:
    """Whether `phases` has anything to draw."""
    return any(spans(lane, "phase") for lane in results.lanes)


def periods(results: Results) -> Figure:
    """Steps between exchanges, and, dotted, the steps that an exchange may take: both over time."""
    figure = drawing.new_figure(6.4, 3.2)
    axes = figure.subplots()
    unit, seconds_per_unit = drawing.time_unit(results)
    heights: list[float] = []
    drawn: list[list[Line2D]] = []
    for index, lane in enumerate(results.lanes):
        period = spans(lane, "period")
        lines = _steps(axes, index, period, seconds_per_unit)
        lines += _steps(axes, index, spans(lane, "wait"), seconds_per_unit, dotted=True)
        heights += [steps_count(span.value) for span in period]
        if lines:
            drawn.append(lines)
    # Periods are few whole numbers and often the same: side by side, no lane hides another.
    for at, lines in enumerate(drawn):
        points = POINTS_APART * (at - (len(drawn) - 1) / 2)
        for line in lines:
            line.set_transform(offset_copy(axes.transData, figure, y=points, units="points"))
    above = [height for height in heights if height > 0]
    if above and max(above) > SPAN_FOR_LOG * min(above):
        # Powers of two, evenly spaced; 0 has its place too, one further down.
        axes.set_yscale("symlog", base=2, linthresh=1, linscale=0.5)
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    else:
        axes.set_ylim(bottom=-0.05 * axes.get_ylim()[1])  # a line at 0 is seen above the axis
        axes.yaxis.set_major_locator(MaxNLocator("auto", integer=True))
    axes.set_xlim(left=0)
    axes.set_xlabel(f"time ({unit})", color=INK.light)
    axes.set_ylabel("period (steps)", color=INK.light)
    drawing.legend(figure, results)
    return figure


def phases(results: Results) -> Figure:
    """One bar for each lane that has phases, a piece of it for each phase."""
    names = drawing.short_labels(results)
    shown = [
        (index, name, found)
        for index, (name, lane) in enumerate(zip(names, results.lanes, strict=True))
        if (found := spans(lane, "phase"))
    ]
    figure = drawing.new_figure(6.4, 0.8 + 0.55 * max(1, len(shown)))
    axes = figure.subplots()
    unit, seconds_per_unit = drawing.time_unit(results)
    longest = max((end_seconds(lane) for lane in results.lanes), default=0.0) or 1.0
    heights = list(range(len(shown)))[::-1]  # the first lane on top
    axes.set_xlim(0, longest / seconds_per_unit)
    axes.set_ylim(-0.5, len(shown) - 0.5 + (1 - BAR_HEIGHT) / 2)
    axes.set_yticks(heights, [name for _, name, _ in shown], color=INK.light)
    for tick in axes.get_yticklabels():
        tick.set_parse_math(False)
    axes.tick_params(axis="y", length=0)
    axes.grid(False)
    axes.set_xlabel(f"time ({unit})", color=INK.light)
    figure.draw_without_rendering()  # now it is known how wide the bars are, and what fits in
    for height, (index, _, found) in zip(heights, shown, strict=True):
        _bar(axes, index, height, _visible(found, BRIEF * longest), seconds_per_unit)
    return figure


def _visible(found: Sequence[Span], brief_seconds: float) -> list[Span]:
    """Brief spans that follow each other become one: however many there are, they can be drawn."""
    seen: list[Span] = []
    for brief, group in groupby(found, lambda span: span.end - span.begin < brief_seconds):
        alike = list(group)
        if brief and len(alike) > 1:
            alike = [Span("…", alike[0].begin, alike[-1].end)]
        seen += alike
    return seen


def _steps(
    axes: Axes, index: int, spans: Sequence[Span], seconds_per_unit: float, dotted: bool = False
) -> list[Line2D]:
    """The line, in a list that is empty where there is nothing to draw."""
    heights = [steps_count(span.value) for span in spans]
    if all(math.isnan(height) for height in heights):
        return []
    spacing = max(1, len(spans) // drawing.MARKS_ON_A_LINE)
    return axes.plot(
        [span.begin / seconds_per_unit for span in spans] + [spans[-1].end / seconds_per_unit],
        [*heights, heights[-1]],
        drawstyle="steps-post",
        color=palette.shade(index).light,
        linestyle=":" if dotted else palette.dash(index),
        linewidth=1.2 if dotted else 1.8,
        marker="" if dotted else palette.mark(index),
        markevery=(index % spacing, spacing),
        markersize=5,
        zorder=3,
        label="wait" if dotted else f"lane {index}",
    )


def _bar(
    axes: Axes, index: int, height: float, spans: Sequence[Span], seconds_per_unit: float
) -> None:
    """The pieces of one bar, each with its name inside or, where that is too narrow, above."""
    colour = palette.shade(index).light
    names = list(dict.fromkeys(span.value for span in spans))
    right = axes.get_xlim()[1]
    taken = 0.0  # up to where names above the bar reach
    for span in spans:
        begin, end = span.begin / seconds_per_unit, span.end / seconds_per_unit
        tint = TINTS[names.index(span.value) % len(TINTS)]
        corner = (begin, height - BAR_HEIGHT / 2)
        piece = Rectangle(corner, end - begin, BAR_HEIGHT, facecolor=(colour, tint), zorder=2)
        piece.set(edgecolor=colour, linewidth=1.0, clip_on=False)
        axes.add_patch(piece)
        text = span.value if isinstance(span.value, str) else units.number(span.value)
        name = axes.text(0, height, label_text(text), parse_math=False, zorder=4)
        name.set(va="center", fontsize=9, color=INK.light)
        name.set_in_layout(False)
        box = name.get_window_extent().transformed(axes.transData.inverted())
        room = 1.15 * box.width  # the page's own face may be wider
        above = min(max(begin, taken), right - room)
        if room <= end - begin:
            name.set(x=(begin + end) / 2, ha="center")
        elif above >= taken:
            name.set(x=above, y=height + BAR_HEIGHT / 2 + 0.03, va="bottom")
            taken = above + room
        else:
            name.remove()  # the table of decisions has it
