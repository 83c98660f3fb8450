"""Lanes made by hand, for all tests of the report."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import pytest

from farandole.report.history import Counters, History, Note, Point
from farandole.report.lane import Lane, Outcome


@pytest.fixture(scope="session")
def make_lane() -> Callable[..., Lane]:
    """`make_lane("daso", [0.5, 0.9])`: a log every second, of 100 samples each.

    `notes` are pairs of seconds and the values decided then.
    """

    def make(
        sync: str = "allreduce",
        values: Sequence[float] = (),
        *,
        metric: str = "accuracy",
        outcome: Outcome = "ok",
        seconds: float = 1.0,
        workers: int = 2,
        problem: str = "",
        damage: tuple[str, ...] = (),
        notes: Sequence[tuple[float, Mapping[str, float | str]]] = (),
    ) -> Lane:
        points = tuple(
            Point(
                time_seconds=seconds * at,
                samples=100 * at,
                steps=10 * at,
                waited_seconds=0.25 * seconds * at,
                bytes_sent=1000 * at,
                metrics={metric: value},
            )
            for at, value in enumerate(values, start=1)
        )
        start = {"event": "start", "sync": sync, "size": workers, "script": "train.py", "seed": 0}
        last = points[-1] if points else Counters()
        decided = tuple(
            Note(
                time_seconds=at,
                samples=int(100 * at),
                steps=int(10 * at),
                waited_seconds=0.25 * at,
                bytes_sent=int(1000 * at),
                values=values,
            )
            for at, values in notes
        )
        history = History(start, points, last, outcome == "ok", damage, decided)
        return Lane(sync, workers, outcome, history, f"farandole run {sync}", problem)

    return make
