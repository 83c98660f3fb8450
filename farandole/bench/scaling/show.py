"""A scaling study in a terminal and as a picture."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import (
    EngFormatter,
    FixedLocator,
    FuncFormatter,
    LogLocator,
    MaxNLocator,
    NullLocator,
    PercentFormatter,
)
from rich import box
from rich.table import Table
from rich.text import Text

from farandole.bench.scaling.plan import Curve
from farandole.bench.scaling.study import Row, curves
from farandole.report import units
from farandole.report.plots import drawing
from farandole.report.plots.palette import INK, LINE, MUTED

_TITLES = ("curve", "n", "batch", "images/s", "±", "epoch", "efficiency", "waited")


def table(rows: Sequence[Row], epoch_images: int, places: tuple[str, int]) -> Table:
    """`places`: what workers compute on, and how many of them there are."""
    among = [row.cell.curve for row in rows]
    kind, count = places
    told = [f"an epoch has {epoch_images:,} images", "batch: of each worker"]
    if any(row.cell.workers > count for row in rows):
        told.append(f"* more workers than {kind}s ({count}): they share them")
    drawn = Table(box=box.SIMPLE_HEAD, padding=0, caption=Text("; ".join(told)))
    drawn.caption_justify = "left"
    for title in _TITLES:
        is_name = title == "curve"
        drawn.add_column(title, justify="left" if is_name else "right", no_wrap=not is_name)
    for row in rows:
        star = "*" if row.cell.workers > count else ""
        drawn.add_row(*map(Text, _cells(row, row.cell.curve.label(among), star)))
    return drawn


def _cells(row: Row, label: str, star: str) -> list[str]:
    first = [label, f"{row.cell.workers}{star}", str(row.cell.batch_size)]
    if row.images_per_second is None:
        return [*first, "failed", *[units.NONE] * 4]
    return [
        *first,
        units.rate(row.images_per_second),
        units.rate(row.margin),
        units.seconds(row.epoch_seconds),
        units.share(row.efficiency),
        units.share(row.waited_share),
    ]


def picture(rows: Sequence[Row], epoch_images: int, title: str, places: tuple[str, int]) -> Figure:
    """Images per second with the ideal, efficiency, and the time of an epoch, by workers."""
    figure = drawing.new_figure(13.0, 4.3)
    speed, efficiency, epoch = figure.subplots(1, 3)
    found = curves(rows)
    among = list(found)
    for index, measured in enumerate(found.values()):
        counts = [float(row.cell.workers) for row in measured]
        rates = [row.images_per_second or 0.0 for row in measured]
        _ideal(speed, counts, rates)
        drawing.line(speed, index, counts, rates)
        drawing.line(efficiency, index, counts, [row.efficiency or 0.0 for row in measured])
        drawing.line(epoch, index, counts, [row.epoch_seconds or 0.0 for row in measured])
    efficiency.axhline(1.0, color=MUTED.light, linewidth=1.2, linestyle=(0, (5, 3)))
    _finish(speed, efficiency, epoch, epoch_images)
    workers = sorted({row.cell.workers for row in rows})
    for axes, note_at in ((speed, 0.02), (efficiency, 0.02), (epoch, 0.96)):  # beside the curves
        _workers_across(axes, workers, places, note_at)
    speed.set_title(title, loc="left", color=INK.light, fontsize=10)
    _legend(figure, speed, among)
    return figure


def _ideal(axes: Axes, counts: Sequence[float], rates: Sequence[float]) -> None:
    ideal = [rates[0] * count / counts[0] for count in counts]
    axes.plot(counts, ideal, color=MUTED.light, linewidth=1.2, linestyle=(0, (5, 3)), label="ideal")


def _finish(speed: Axes, efficiency: Axes, epoch: Axes, epoch_images: int) -> None:
    for axes in (speed, epoch):
        axes.set_yscale("log")
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_locator(FixedLocator(_log_ticks(*axes.get_ylim())))
    speed.yaxis.set_major_formatter(EngFormatter(sep=" "))
    speed.set_ylabel("images per second, all workers", color=INK.light)
    efficiency.set_ylim(bottom=0)
    efficiency.yaxis.set_major_formatter(PercentFormatter(xmax=1.0, symbol=" %"))
    efficiency.set_ylabel("efficiency", color=INK.light)
    epoch.yaxis.set_major_formatter(EngFormatter(unit="s", sep=" "))
    epoch.set_ylabel(f"time of an epoch of {epoch_images:,} images", color=INK.light)


def _log_ticks(low: float, high: float) -> list[float]:
    """At least three, also where the axis has no whole power of ten, as between 110 and 220."""
    locators = [LogLocator(subs=subs) for subs in ((1.0,), (1.0, 2.0, 5.0))]
    for locator in (*locators, MaxNLocator(5)):
        inside = [float(tick) for tick in locator.tick_values(low, high) if low <= tick <= high]
        if len(inside) >= 3:
            break
    return inside


def _workers_across(
    axes: Axes, workers: Sequence[int], places: tuple[str, int], note_at: float = 0.02
) -> None:
    kind, count = places
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator([float(number) for number in workers]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0f}"))
    axes.set_xlabel("workers", color=INK.light)
    if workers[-1] > count:
        low, high = axes.get_xlim()
        axes.axvspan(count * 1.02, high, color=LINE.light, alpha=0.5, zorder=0)
        axes.annotate(
            f"more workers than {kind}s",
            (1.0, note_at),
            xycoords="axes fraction",
            ha="right",
            fontsize=8,
            color=MUTED.light,
        )
        axes.set_xlim(low, high)


def _legend(figure: Figure, axes: Axes, among: Sequence[Curve]) -> None:
    lines = {str(line.get_label()): line for line in axes.get_lines()}
    entries = [(lines[f"lane {at}"], curve.label(among)) for at, curve in enumerate(among)]
    if "ideal" in lines:
        entries.append((lines["ideal"], "ideal"))
    if entries:
        figure.legend(
            [line for line, _ in entries],
            [drawing.label_text(name) for _, name in entries],
            loc="outside upper left",
            ncols=min(len(entries), 5),
            frameon=False,
            labelcolor=INK.light,
        )
