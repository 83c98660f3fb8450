"""The same rows as a picture: time by size, and how many times as long the alternatives take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, FixedLocator, FuncFormatter, LogLocator, NullLocator

from farandole.bench.comm.rows import Row, Timing
from farandole.bench.comm.sizes import format_size
from farandole.report.plots import drawing, palette
from farandole.report.plots.palette import INK, MUTED

_MOST_TICKS = 6
_FEW_DECADES = 300.0


def speeds(rows: Sequence[Row], title: str) -> Figure:
    """On the left the times, on the right the ratios to each alternative; logarithmic."""
    figure = drawing.new_figure(11.0, 4.2)
    algorithms = list(dict.fromkeys(row.algorithm for row in rows))
    rivals = list(rows[0].against)
    times, ratios = figure.subplots(1, 2) if rivals else (figure.subplots(), None)
    lines: Mapping[str, Sequence[tuple[int, Timing]]] = {
        **{
            name: [(row.bytes, row.time) for row in rows if row.algorithm == name]
            for name in algorithms
        },
        **{
            name: [(row.bytes, row.against[name]) for row in rows if row.algorithm == algorithms[0]]
            for name in rivals
        },
    }
    for index, points in enumerate(lines.values()):
        _draw_times(times, index, points)
    _log_up(times)
    times.yaxis.set_major_formatter(EngFormatter(unit="s", sep=" "))
    times.set_title(title, loc="left", color=INK.light, fontsize=10)
    times.set_ylabel("median time, quartiles shaded", color=INK.light)
    _sizes_across(times, rows)
    if ratios is not None:
        _draw_ratios(ratios, rows, algorithms, rivals)
    names = [*(f"farandole {name}" for name in algorithms), *rivals]
    figure.legend(
        times.get_lines(),
        names,
        loc="outside upper left",
        ncols=min(len(names), 6),
        frameon=False,
        labelcolor=INK.light,
    )
    return figure


def _draw_times(axes: Axes, index: int, points: Sequence[tuple[int, Timing]]) -> None:
    sizes = [float(size) for size, _ in points]
    drawing.line(axes, index, sizes, [timing.median for _, timing in points])
    axes.fill_between(
        sizes,
        [timing.quartile_1 for _, timing in points],
        [timing.quartile_3 for _, timing in points],
        color=palette.shade(index).light,
        alpha=0.18,
        linewidth=0,
    )


def _draw_ratios(
    axes: Axes, rows: Sequence[Row], algorithms: Sequence[str], rivals: Sequence[str]
) -> None:
    """A curve for each pair, in the colour of the algorithm and with the rival's dashes."""
    for place, name in enumerate(algorithms):
        mine = [row for row in rows if row.algorithm == name]
        for number, rival in enumerate(rivals):
            axes.plot(
                [row.bytes for row in mine],
                [row.ratios[rival] for row in mine],
                color=palette.shade(place).light,
                linestyle=palette.DASHES[number % len(palette.DASHES)],
                marker=palette.mark(len(algorithms) + number),
                markersize=5,
                linewidth=1.8,
                label=f"{rival} / {name}",
                zorder=3,
            )
    axes.axhline(1.0, color=MUTED.light, linewidth=1.0, linestyle=(0, (5, 3)))
    found = [row.ratios[rival] for row in rows for rival in rivals]
    axes.set_ylim(min(0.5, *found) / 1.2, max(2.0, *found) * 1.2)
    _log_up(axes)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}×"))
    axes.set_ylabel("time of the alternative / ours", color=INK.light)
    _sizes_across(axes, rows)
    axes.legend(frameon=False, labelcolor=INK.light)


def _log_up(axes: Axes) -> None:
    """Marks at 1, 2 and 5 of each decade, or at 1 alone where there are many decades."""
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    few = high / low < _FEW_DECADES
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if few else (1.0,), numticks=20))
    axes.yaxis.set_minor_locator(NullLocator())


def _sizes_across(axes: Axes, rows: Sequence[Row]) -> None:
    sizes = sorted({row.bytes for row in rows})
    every = -(-len(sizes) // _MOST_TICKS)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator([float(size) for size in sizes[::every]]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: format_size(round(value))))
    axes.set_xlabel("bytes on each rank", color=INK.light)
