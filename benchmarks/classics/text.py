"""docs/classics.md: the words are in page.md.jinja, and the numbers come from the JSON."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import jinja2

from classics.figures import BATCH_NAMES, FIT_AFTER, fixed_periods, measured_ratio
from classics.results import lanes_of, median_to_target
from classics.theory import fit

Races = Mapping[str, Any]
Runs = Sequence[Mapping[str, Any]]
TEMPLATE = Path(__file__).with_name("page.md.jinja")
LAST = 3  # logs, of which the mean is what a run ends with


def page(pieces: Mapping[str, Any], folder: Path) -> str:
    """The whole page. Pieces that were not run are left out; `folder` has the figures."""
    numbers: dict[str, Any] = {
        piece: section(pieces[piece]["races"])
        for piece, section in SECTIONS.items()
        if pieces.get(piece, {}).get("races")
    }
    files = {path.name for path in folder.glob("*")}
    undefined = jinja2.StrictUndefined
    known = dict.fromkeys(SECTIONS) | numbers
    template = jinja2.Template(
        TEMPLATE.read_text(), undefined=undefined, keep_trailing_newline=True
    )
    return template.render(known, files=files, machines=machines(pieces))


def machines(pieces: Mapping[str, Any]) -> str:
    found = [kept["environment"] for kept in pieces.values() if kept.get("races")]
    said = {f"{e['cpus']} cores ({e['machine']}), torch {e['torch']}, {e['date']}" for e in found}
    return "; ".join(sorted(said))


def strategies(races: Races) -> dict[str, Any]:
    return lanes_section(races["strategies"])


def adacomm(races: Races) -> dict[str, Any]:
    race = races["adacomm"]
    lanes = lanes_of(race)
    ends = {name: [at_end(run, "loss") for run in runs] for name, runs in lanes.items()}
    fixed = {name: fmean(found) for name, found in ends.items() if name.startswith("local")}
    best = min(fixed, key=lambda name: fixed[name])
    own = next(name for name in lanes if name.startswith("adacomm"))
    ratios = [mine / other for mine, other in zip(ends[own], ends[best], strict=False)]
    _, way = measured_ratio(race)
    return {
        "setting": setting(race),
        "rows": [
            {
                "name": name,
                "steps": f"{fmean(run['steps'] for run in runs):,.0f}",
                "end": f"{fmean(ends[name]):.4f}",
                "ends": ", ".join(f"{value:.4f}" for value in ends[name]),
                "to_target": seconds(median_to_target(runs)),
            }
            for name, runs in lanes.items()
        ],
        "best": best,
        "ratio": f"{fmean(ends[own]) / fixed[best]:.3f}",
        "ratios": ", ".join(f"{ratio:.3f}" for ratio in ratios),
        "wins": "always" if max(ratios) < 1 else "mostly" if fmean(ratios) < 1 else "no",
        "way": f"{min(way):.3f} and {max(way):.3f}" if way else "",
        **theory(race),
    }


def theory(race: Mapping[str, Any]) -> dict[str, Any]:
    """The constants of the bound, and what follows from them."""
    bound = fit(fixed_periods(race), FIT_AFTER)
    longest = max(fixed_periods(race))
    end = max(run["seconds"] for run in race["runs"])
    drift = bound.a * bound.meeting / bound.c if bound.c else math.inf
    best = bound.best_fixed(end, longest)
    met = bound.a * bound.meeting / (end * min(longest, bound.best_period(end)))
    return {
        "compute": f"{1000 * bound.compute:.2f}",
        "meeting": f"{1000 * bound.meeting:.2f}",
        "alpha": f"{bound.meeting / bound.compute:.1f}" if bound.compute else "many",
        "a": f"{bound.a:.3g}",
        "b": f"{bound.b:.3g}",
        "c": f"{bound.c:.2g}",
        "drifts": bound.c > 0,
        "longest": longest,
        "begins": f"{drift / longest**2:.3g}",
        "ends": f"{drift:.3g}",
        "seconds": f"{end:.0f}",
        "share": f"{100 * met / best:.1f}",
        "gain": f"{100 * (1 - bound.ideal(end, longest) / best):.1f}",
    }


def staleness(races: Races) -> dict[str, Any]:
    lanes = lanes_of(races["staleness"])
    strictest, *_, loosest = lanes
    return {
        **lanes_section(races["staleness"]),
        "strictest": strictest,
        "loosest": loosest,
        "speed": f"{rate(lanes[loosest]) / rate(lanes[strictest]):.2f}",
    }


def pipelines(races: Races) -> list[dict[str, Any]]:
    kinds = {"pipelines_dense": "dense", "pipelines_convolutional": "convolutional"}
    return [
        {**lanes_section(races[name]), "kind": kind}
        for name, kind in kinds.items()
        if name in races
    ]


def large_batch(races: Races) -> dict[str, Any]:
    ends = {name: [at_end(run, "error") for run in race["runs"]] for name, race in races.items()}
    return {
        "setting": setting(next(iter(races.values()))),
        "rows": [
            {
                "name": BATCH_NAMES[name],
                "end": f"{fmean(ends[name]):.3f}",
                "ends": ", ".join(f"{value:.3f}" for value in ends[name]),
                "to_target": seconds(median_to_target(race["runs"])),
                "rate": f"{rate(race['runs']):,.0f}",
                "problem": problem(race["runs"]),
            }
            for name, race in races.items()
        ],
    }


def lanes_section(race: Mapping[str, Any]) -> dict[str, Any]:
    """All lanes, by time to the target; those that never reached it last."""
    lanes = lanes_of(race)
    times = {name: median_to_target(runs) for name, runs in lanes.items()}
    order = sorted(lanes, key=lambda name: math.inf if times[name] is None else times[name])
    first = order[0] if times[order[0]] is not None else None
    return {
        "setting": setting(race),
        "first": first,
        "after": seconds(times[order[0]]),
        "rows": [lane_row(name, lanes[name]) for name in order],
    }


def lane_row(name: str, runs: Runs) -> dict[str, str]:
    times = [run["seconds_to_target"] for run in runs]
    fastest = min((time for time in times if time is not None), default=None)
    slowest = None if None in times else max(times)
    return {
        "name": name,
        "to_target": seconds(median_to_target(runs)),
        "spread": f"{seconds(fastest)} – {seconds(slowest)}",
        "reached": f"{sum(time is not None for time in times)} of {len(times)}",
        "rate": f"{rate(runs):,.0f}",
        "sent": f"{fmean(run['bytes_sent'] for run in runs) / 1e6:.1f} MB",
        "problem": problem(runs),
    }


def problem(runs: Runs) -> str:
    """Why the first of them failed that did; empty: none."""
    return next((run["problem"] for run in runs if run["outcome"] not in ("ok", "stopped")), "")


def setting(race: Mapping[str, Any]) -> str:
    """Target, link and seeds, in one sentence."""
    seeds = len({run["seed"] for run in race["runs"]})
    times = f"{seeds} seeds" if seeds > 1 else "one seed"
    return f"Target: `{race['target']}`; link: {race['link']}; {times}."


def seconds(value: float | None) -> str:
    return "never" if value is None else f"{value:.1f} s"


def rate(runs: Runs) -> float:
    """Samples a second."""
    return fmean(run["samples"] / run["seconds"] if run["seconds"] else 0.0 for run in runs)


def at_end(run: Mapping[str, Any], metric: str) -> float:
    """The mean of its last logs."""
    values = [float(point[metric]) for point in run["points"] if metric in point]
    return fmean(values[-LAST:]) if values else math.nan


SECTIONS: dict[str, Callable[[Races], Any]] = {
    "strategies": strategies,
    "adacomm": adacomm,
    "staleness": staleness,
    "pipelines": pipelines,
    "large_batch": large_batch,
}
