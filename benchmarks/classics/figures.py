"""The four curves of the literature, drawn by the plots of the report from the kept points."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from classics.results import lanes_of, mean_lane, median_to_target
from classics.theory import fit
from farandole.files import write_whole
from farandole.report.axes import Axis
from farandole.report.lane import Lane
from farandole.report.plots import drawing, palette, render
from farandole.report.plots.curves import draw_curve
from farandole.report.plots.palette import INK
from farandole.report.standing import Results
from farandole.report.target import Target

Races = Mapping[str, Any]
WIDTH, HEIGHT = 12.0, 4.0
LINKS = (0.5, 4.0, 32.0)  # how many times as long as computing a step a meeting takes
FIT_AFTER = 5.0  # seconds: before that a loss falls faster than 1/T


def draw_all(pieces: Mapping[str, Any], folder: Path) -> Iterator[Path]:
    """The SVGs of each piece that has figures and was run."""
    for name, (piece, drawn) in FIGURES.items():
        if pieces.get(piece, {}).get("races"):
            path = folder / f"{name}.svg"
            races = pieces[piece]["races"]
            write_whole(path, render.picture(path, lambda d=drawn, r=races: d(r), name))
            yield path


def results_of(race: Mapping[str, Any]) -> Results:
    """The mean run of each lane that logged anything."""
    lanes = [
        mean_lane(name, logged, race["link"])
        for name, runs in lanes_of(race).items()
        if (logged := [run for run in runs if run["points"]])
    ]
    return Results(tuple(lanes), Target.parse(race["target"]))


def curves(axes: Axes, results: Results, metric: str, axis: Axis, title: str) -> None:
    draw_curve(axes, results, metric, axis)
    axes.set_title(title, color=INK.light, fontsize=10)


def adacomm(races: Races) -> Figure:
    """Left: measured. Right: the bound with constants fitted to the fixed periods."""
    race = races["adacomm"]
    results = results_of(race)
    figure = drawing.new_figure(WIDTH, HEIGHT)
    left, right = figure.subplots(1, 2, sharey=True)
    curves(left, results, "loss", "time", "measured, mean over seeds")
    bound_curves(right, race, results.lanes)
    drawing.legend(figure, results)
    return figure


def bound_curves(axes: Axes, race: Mapping[str, Any], lanes: Sequence[Lane]) -> None:
    found = lanes_of(race)
    bound = fit(fixed_periods(race), FIT_AFTER)
    for index, lane in enumerate(lanes):
        seconds = [p.time_seconds for p in lane.history.points if p.time_seconds >= FIT_AFTER / 2]
        if lane.sync.startswith("adacomm"):
            run = found[lane.sync][0]
            decisions = decisions_of(run)
            heights = [bound.adaptive(at, decisions) for at in seconds]
        else:
            heights = [bound.error(at, period_of(lane.sync)) for at in seconds]
        drawing.line(axes, index, seconds, heights)
    axes.set_title(
        f"the bound, fitted: A = {bound.a:.3g} steps, B = {bound.b:.3g}, C = {bound.c:.2g}",
        color=INK.light,
        fontsize=10,
    )
    axes.set_xlim(left=0)
    axes.set_xlabel("time (seconds)", color=INK.light)


def adacomm_theory(races: Races) -> Figure:
    """Where a period that changes can win: its error over that of the best fixed one, by time."""
    race = races["adacomm"]
    bound = fit(fixed_periods(race), FIT_AFTER)
    end = max(run["seconds"] for run in race["runs"])
    longest = max(fixed_periods(race))
    times = np.geomspace(end / 30, end * 100, 80)
    figure = drawing.new_figure(WIDTH, HEIGHT)
    left, right = figure.subplots(1, 2)
    ideal = [bound.ideal(at, longest) / bound.best_fixed(at, longest) for at in times]
    left.plot(times, ideal, color=palette.shade(0).light, label="τ*(t), the bound's best")
    adaptive = next(
        (runs[0] for name, runs in lanes_of(race).items() if name.startswith("adacomm")), None
    )
    if adaptive is not None and adaptive["points"]:
        taken = [bound.adaptive(at, decisions_of(adaptive)) for at in times]
        ratios = [t / bound.best_fixed(at, longest) for t, at in zip(taken, times, strict=True)]
        left.plot(times, ratios, color=palette.shade(1).light, label="the periods of the run")
        left.plot(*measured_ratio(race), ".", color=palette.shade(2).light, label="measured")
    left.axvline(end, color=INK.light, linestyle=":", linewidth=1)
    left.set_title("over the link of the race (dotted: its end)", color=INK.light, fontsize=10)
    for index, alpha in enumerate(LINKS):
        slower = bound.with_meeting(alpha)
        heights = [slower.ideal(at, longest) / slower.best_fixed(at, longest) for at in times]
        colour = palette.shade(index).light
        right.plot(times, heights, color=colour, label=f"a meeting takes {alpha:g} steps")
    right.set_title("the bound's best, over other links", color=INK.light, fontsize=10)
    for axes in (left, right):
        axes.set_xscale("log")
        axes.axhline(1.0, color=INK.light, linewidth=1)
        axes.set_xlabel("time (seconds)", color=INK.light)
        axes.set_ylabel("loss over that of the best fixed period", color=INK.light)
        axes.legend(frameon=False, fontsize=9)
    return figure


def measured_ratio(race: Mapping[str, Any]) -> tuple[list[float], list[float]]:
    """AdaComm's loss over the lowest one of the fixed periods, at the same times; mean losses."""
    lanes = results_of(race).lanes
    curves = {lane.sync: loss_curve(lane) for lane in lanes}
    own = next(curve for name, curve in curves.items() if name.startswith("adacomm"))
    fixed = [curve for name, curve in curves.items() if name.startswith("local")]
    begin = max(curve[0][0] for curve in (own, *fixed))
    end = min(curve[0][-1] for curve in (own, *fixed))
    times = [at for at in own[0] if begin <= at <= end]
    best = np.min([np.interp(times, *curve) for curve in fixed], axis=0)
    return times, list(np.interp(times, *own) / best)


def loss_curve(lane: Lane) -> tuple[list[float], list[float]]:
    points = lane.history.points
    return [p.time_seconds for p in points], [p.metrics["loss"] for p in points]


def fixed_periods(race: Mapping[str, Any]) -> dict[int, list[dict[str, Any]]]:
    return {
        period_of(name): runs for name, runs in lanes_of(race).items() if name.startswith("local")
    }


def period_of(lane: str) -> int:
    """`local` alone has its default."""
    return int(lane.partition("every=")[2] or 8)


def decisions_of(run: Mapping[str, Any]) -> list[tuple[float, float]]:
    first = int(run["lane"].partition("start=")[2].partition(",")[0] or 16)
    return [(0.0, first), *((note["seconds"], note["period"]) for note in run["periods"])]


def staleness(races: Races) -> Figure:
    """Error against time, and what the bound does to steps and to the time to the target."""
    race = races["staleness"]
    results = results_of(race)
    figure = drawing.new_figure(WIDTH, HEIGHT)
    left, right = figure.subplots(1, 2)
    curves(left, results, "error", "time", "test error, mean over seeds")
    names, rates, times = [], [], []
    for name, runs in lanes_of(race).items():
        names.append(name.removeprefix("server:").removeprefix("staleness="))
        rates.append(sum(run["samples"] / run["seconds"] for run in runs) / len(runs))
        times.append(median_to_target(runs))
    places = range(len(names))
    right.plot(
        places, [rate / rates[0] for rate in rates], marker="o", color=palette.shade(0).light
    )
    first = times[0] or float("nan")
    shown = [first / time if time else float("nan") for time in times]
    right.plot(places, shown, marker="s", color=palette.shade(1).light)
    right.set_xticks(list(places), names)
    right.set_xlabel("staleness", color=INK.light)
    right.set_title(
        "over bsp: samples/s (●), speed to the target (■)", color=INK.light, fontsize=10
    )
    drawing.legend(figure, results)
    return figure


def pipelines(races: Races) -> Figure:
    figure = drawing.new_figure(WIDTH, HEIGHT)
    titles = {
        "pipelines_dense": ("error", "dense network"),
        "pipelines_convolutional": ("accuracy", "convolutional network"),
    }
    drawn = [name for name in titles if name in races]
    every = figure.subplots(1, len(drawn), squeeze=False)[0]
    for axes, name in zip(every, drawn, strict=True):
        metric, title = titles[name]
        curves(axes, results_of(races[name]), metric, "time", title)
    drawing.legend(figure, results_of(races[drawn[0]]))
    return figure


BATCH_NAMES = {
    "batch_32": "batch 32",
    "batch_1024_same_rate": "batch 1024, same rate",
    "batch_1024_scaled": "batch 1024, 32 times the rate",
    "batch_1024_scaled_warmup": "batch 1024, 32 times the rate, warm-up",
}


def large_batch(races: Races) -> Figure:
    lanes, target = [], None
    for name, race in races.items():
        target = Target.parse(race["target"])
        runs = [run for run in race["runs"] if run["points"]]
        if runs:
            lanes.append(mean_lane(BATCH_NAMES[name], runs, race["link"]))
    results = Results(tuple(lanes), target)
    figure = drawing.new_figure(WIDTH, HEIGHT)
    left, right = figure.subplots(1, 2, sharey=True)
    curves(left, results, "error", "samples", "against samples, mean over seeds")
    curves(right, results, "error", "time", "against time")
    drawing.legend(figure, results)
    return figure


FIGURES: dict[str, tuple[str, Callable[[Races], Figure]]] = {
    "adacomm": ("adacomm", adacomm),
    "adacomm_theory": ("adacomm", adacomm_theory),
    "staleness": ("staleness", staleness),
    "pipelines": ("pipelines", pipelines),
    "large_batch": ("large_batch", large_batch),
}
