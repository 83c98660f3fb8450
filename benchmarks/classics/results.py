"""Races to JSON and back: points of every run, so that figures can be drawn without the runs."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from farandole.race.record import NAME, RaceRecord, read_record
from farandole.report.history import Counters, History, Point
from farandole.report.lane import Lane
from farandole.report.target import Target

DIGITS = 5


def race_in(folder: Path) -> Path | None:
    """The folder of the race that was begun under `folder`; None: none was."""
    return next((path.parent for path in sorted(folder.glob(f"*/{NAME}"))), None)


def read_race(folder: Path) -> dict[str, Any]:
    """All its runs that are over, as plain data."""
    record = read_record(folder)
    lanes = record.lanes(folder)
    return {
        "target": record.target,
        "link": next((lane.simulated_link for lane in lanes if lane.simulated_link), ""),
        "runs": [
            _run(record, lane, seed) for lane, seed in zip(lanes, _seeds(record), strict=True)
        ],
    }


def _seeds(record: RaceRecord) -> list[int]:
    return [run.seed for run in sorted(record.runs, key=lambda run: (run.number, run.seed))]


def _run(record: RaceRecord, lane: Lane, seed: int) -> dict[str, Any]:
    target = Target.parse(record.target) if record.target else None
    last = lane.history.last
    return {
        "lane": lane.name,
        "seed": seed,
        "workers": lane.workers,
        "outcome": lane.outcome,
        "problem": lane.problem,
        "seconds_to_target": target.reached(lane.history) if target else None,
        "seconds": round(last.time_seconds, 3),
        "waited_seconds": round(last.waited_seconds, 3),
        "steps": last.steps,
        "samples": last.samples,
        "bytes_sent": last.bytes_sent,
        "points": [
            {
                "seconds": round(point.time_seconds, 3),
                "samples": point.samples,
                "steps": point.steps,
                **{name: _rounded(value) for name, value in point.metrics.items()},
            }
            for point in lane.history.points
        ],
        "periods": [
            {"seconds": round(note.time_seconds, 3), "period": note.values["period"]}
            for note in lane.history.notes
            if "period" in note.values
        ],
    }


def _rounded(value: float) -> float | str:
    return round(value, DIGITS) if math.isfinite(value) else str(value)


def lanes_of(race: Mapping[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """The runs of each lane, in the order of the lanes."""
    found: dict[str, list[dict[str, Any]]] = {}
    for run in race["runs"]:
        found.setdefault(run["lane"], []).append(run)
    return found


def median_to_target(runs: Sequence[Mapping[str, Any]]) -> float | None:
    """A run that never reached it counts as one that takes forever."""
    times = [
        math.inf if run["seconds_to_target"] is None else run["seconds_to_target"] for run in runs
    ]
    middle = median(times)
    return middle if math.isfinite(middle) else None


def series(run: Mapping[str, Any], metric: str) -> tuple[list[float], list[float]]:
    """Seconds, and values as numbers; "nan" and "inf" become floats."""
    points = [point for point in run["points"] if metric in point]
    return [point["seconds"] for point in points], [float(point[metric]) for point in points]


def mean_lane(name: str, runs: Sequence[Mapping[str, Any]], link: str, points: int = 60) -> Lane:
    """One lane for the report's plots: the mean over seeds, at the same times."""
    if len(runs) == 1:
        return _lane(name, runs[0], runs[0]["points"], link)
    names = [key for key in runs[0]["points"][0] if key not in ("seconds", "steps")]
    begin = max(run["points"][0]["seconds"] for run in runs)
    end = min(run["points"][-1]["seconds"] for run in runs)
    count = min(points, *(len(run["points"]) for run in runs))
    grid = np.linspace(begin, end, count)
    columns = {
        key: np.mean([np.interp(grid, *series(run, key)) for run in runs], axis=0) for key in names
    }
    rows = [
        {"seconds": float(at), "steps": 0, **{key: float(columns[key][i]) for key in names}}
        for i, at in enumerate(grid)
    ]
    return _lane(name, runs[0], rows, link)


def _lane(
    name: str, run: Mapping[str, Any], points: Sequence[Mapping[str, Any]], link: str
) -> Lane:
    kept = tuple(
        Point(
            point["seconds"],
            int(point["samples"]),
            int(point["steps"]),
            metrics={
                key: float(value)
                for key, value in point.items()
                if key not in ("seconds", "samples", "steps")
            },
        )
        for point in points
    )
    last: Counters = kept[-1] if kept else Counters()
    start = {"simulated_link": link} if link else {}
    return Lane(name, run["workers"], run["outcome"], History(start, kept, last, True))


def relabelled(lanes: Sequence[Lane], name: Callable[[str], str]) -> list[Lane]:
    return [replace(lane, sync=name(lane.sync)) for lane in lanes]


def read_json(path: Path) -> dict[str, Any] | None:
    return json.loads(path.read_text()) if path.is_file() else None
