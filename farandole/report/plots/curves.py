"""The curves of a race. Each figure is a small function of the results, drawn by object.

Matplotlib's pyplot keeps global state and may open windows, so `Figure` is used directly; and the
user's own matplotlibrc is set aside (see `render.py`), or the report would look different on
every machine.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, PercentFormatter

from farandole.report import units
from farandole.report.axes import Axis, spent, title
from farandole.report.history import Counters, Point
from farandole.report.lane import Lane
from farandole.report.plots import drawing, palette
from farandole.report.plots.drawing import drawable, label_text
from farandole.report.plots.palette import INK, LINE, MUTED
from farandole.report.standing import Results
from farandole.report.target import Target

DECADES_FOR_LOG = 2.5
SMALLEST_ON_LOG = 1e-100


def curve(results: Results, metric: str, axis: Axis) -> Figure:
    """One metric against time, samples or a cost, one line for each lane."""
    figure = drawing.new_figure(6.4, 3.2)
    draw_curve(figure.subplots(), results, metric, axis)
    drawing.legend(figure, results)
    return figure


def waiting(results: Results) -> Figure:
    """For each lane, the part of its time that rank 0 waited for communication."""
    figure = drawing.new_figure(6.4, 0.9 + 0.42 * max(1, len(results.lanes)))
    draw_waiting(figure.subplots(), results)
    return figure


def bytes_over_time(results: Results) -> Figure:
    """What rank 0 had sent by when."""
    figure = drawing.new_figure(6.4, 3.2)
    draw_bytes(figure.subplots(), results)
    drawing.legend(figure, results)
    return figure


def overview(results: Results) -> Figure:
    """The race on one sheet, for `report.png`."""
    curves_inches, bars_inches = 3.7, max(3.5, 0.9 + 0.3 * len(results.lanes))
    if results.goal is None:
        figure = drawing.new_figure(12.0, bars_inches)
        waited, sent = figure.subplots(1, 2)
    else:
        figure = drawing.new_figure(12.0, curves_inches + bars_inches)
        # Apart, or the long names in the lower row would squeeze the curves in the upper one.
        rows = figure.add_gridspec(2, 1, height_ratios=(curves_inches, bars_inches))
        by_time, by_samples = figure.add_subfigure(rows[0]).subplots(1, 2)
        waited, sent = figure.add_subfigure(rows[1]).subplots(1, 2)
        draw_curve(by_time, results, results.goal.metric, "time")
        draw_curve(by_samples, results, results.goal.metric, "samples")
    draw_waiting(waited, results)
    draw_bytes(sent, results)
    drawing.legend(figure, results)
    return figure


def draw_curve(axes: Axes, results: Results, metric: str, axis: Axis) -> None:
    unit, seconds_per_unit = drawing.time_unit(results)
    target = results.target if results.target and results.target.metric == metric else None
    if target is not None and math.isnan(drawable(target.value)):
        target = None
    values = [target.value] if target else []
    for index, lane in enumerate(results.lanes):
        series = lane.history.series(metric)
        heights = [drawable(point.metrics[metric]) for point in series]
        finite = [(p, h) for p, h in zip(series, heights, strict=True) if not math.isnan(h)]
        if not finite:
            continue
        across = partial(_across, lane, axis, seconds_per_unit)
        values += [height for _, height in finite]
        drawing.line(axes, index, [across(point) for point in series], heights)
        if lane.outcome == "failed":
            last, height = finite[-1]
            drawing.failed_spot(axes, across(last), height)
        if target is not None and (met := target.first_met(lane.history)) is not None:
            drawing.reached_spot(axes, index, across(met), drawable(met.metrics[metric]))
    if _wants_log(values):
        axes.set_yscale("log")
    if target is not None:
        _target_line(axes, target)
    axes.set_xlim(left=0)  # starting up is part of the race
    axes.set_ylabel(label_text(metric), color=INK.light, parse_math=False)
    name = title(axis, results)
    in_unit = name.replace("time", f"time ({unit})", 1) if axis == "time" else name
    axes.set_xlabel(in_unit, color=INK.light)
    if axis not in ("time", "money"):
        unit_name = {"bytes": "B", "energy": "J"}.get(axis, "")
        axes.xaxis.set_major_formatter(EngFormatter(unit=unit_name, sep=" "))


def _across(lane: Lane, axis: Axis, seconds_per_unit: float, point: Point) -> float:
    """NaN, which is not drawn, where a run does not know it."""
    value = spent(lane, axis, point)
    if value is None:
        return math.nan
    return value / seconds_per_unit if axis == "time" else value


def draw_waiting(axes: Axes, results: Results) -> None:
    lanes = results.lanes
    heights = list(range(len(lanes)))[::-1]  # the first lane on top
    axes.barh(heights, [1.0] * len(lanes), height=0.62, color=LINE.light)
    for index, (height, lane) in enumerate(zip(heights, lanes, strict=True)):
        share = lane.waited_share
        text = "nothing measured"
        if share is not None:
            axes.barh(height, min(share, 1.0), height=0.62, color=palette.shade(index).light)
            text = f"{units.share(share)}, {units.seconds(lane.waited_seconds)}"
        axes.annotate(
            text,
            (1.0, height),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
            color=INK.light,
            annotation_clip=False,
        )
    axes.set_xlim(0, 1)
    axes.set_yticks(heights, drawing.short_labels(results), color=INK.light)
    for tick in axes.get_yticklabels():
        tick.set_parse_math(False)
    axes.tick_params(axis="y", length=0)
    axes.grid(False)
    axes.xaxis.set_major_formatter(PercentFormatter(xmax=1.0, symbol=" %"))
    axes.set_xlabel("share of the time that rank 0 waited", color=INK.light)


def draw_bytes(axes: Axes, results: Results) -> None:
    unit, seconds_per_unit = drawing.time_unit(results)
    for index, lane in enumerate(results.lanes):
        if lane.total_seconds > 0:
            history = lane.history
            counters: list[Counters] = [*history.points, *history.notes, history.last]
            counters.sort(key=lambda counter: counter.time_seconds)
            times = [0.0, *(counter.time_seconds / seconds_per_unit for counter in counters)]
            drawing.line(axes, index, times, [0.0, *(float(c.bytes_sent) for c in counters)])
    axes.set_xlim(left=0)
    axes.set_xlabel(f"time ({unit})", color=INK.light)
    axes.set_ylabel("sent by rank 0", color=INK.light)
    axes.yaxis.set_major_formatter(EngFormatter(unit="B", sep=" "))


def _wants_log(values: Sequence[float]) -> bool:
    """A loss that falls through decades is a flat line on any other axis."""
    if not values or min(values) < SMALLEST_ON_LOG:
        return False
    return math.log10(max(values)) - math.log10(min(values)) > DECADES_FOR_LOG


def _target_line(axes: Axes, target: Target) -> None:
    """Named at the left, where the curves have not come near the target yet."""
    axes.axhline(target.value, color=MUTED.light, linewidth=1.0, linestyle=(0, (5, 3)))
    axes.annotate(
        label_text(str(target)),
        (0.015, target.value),
        xycoords=axes.get_yaxis_transform(),
        xytext=(0, 3),
        textcoords="offset points",
        color=MUTED.light,
        parse_math=False,
    )
