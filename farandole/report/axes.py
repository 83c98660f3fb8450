"""What a metric may be drawn against: time, samples, and what a run costs."""

from __future__ import annotations

from typing import Literal

from farandole.report.history import Counters
from farandole.report.lane import Lane
from farandole.report.standing import Results

Axis = Literal["time", "samples", "bytes", "energy", "money"]

TITLES: dict[Axis, str] = {
    "time": "time",
    "samples": "samples, over all workers",
    "bytes": "sent by rank 0",
    "energy": "energy",
    "money": "cost of all workers",
}


def known_axes(results: Results) -> list[Axis]:
    """Those that there are numbers for."""
    known: list[Axis] = ["time", "samples", "bytes"]
    known += ["energy"] if results.has_energy else []
    return [*known, "money"] if results.prices else known


def spent(lane: Lane, axis: Axis, counters: Counters) -> float | None:
    """How far along the axis a lane is; None where it does not know."""
    if axis == "money":
        return lane.cost(counters.time_seconds)
    if axis == "energy":
        return counters.energy_joules
    if axis == "time":
        return counters.time_seconds
    return float(counters.samples if axis == "samples" else counters.bytes_sent)


def title(axis: Axis, results: Results) -> str:
    """Time over a simulated link is said to be simulated."""
    links = results.simulated_links if axis == "time" else ()
    return TITLES[axis] + "".join(f", simulated link: {link}" for link in links)
