"""Lanes with several seeds: medians, who was first, and whose order is not certain."""

from __future__ import annotations

import json
from pathlib import Path

from farandole.report.history import History, Point
from farandole.report.lane import Lane, labels
from farandole.report.page import write_report
from farandole.report.repeats import are_repeated, placed
from farandole.report.repeats_text import repeats_headline
from farandole.report.summary import plain
from farandole.report.target import Target

TARGET = Target.parse("accuracy=0.9")


def lane(sync: str, seed: int, seconds: float | None, outcome: str = "ok") -> Lane:
    """One that reaches the target after so many seconds, or never."""
    end = Point(time_seconds=seconds or 50.0, metrics={"accuracy": 0.95 if seconds else 0.5})
    history = History(points=(end,), last=end, finished=True)
    return Lane(sync, 2, outcome, history, seed=seed)  # type: ignore[arg-type]


def lanes(**times: list[float | None]) -> list[Lane]:
    return [lane(sync, at, t) for sync, many in times.items() for at, t in enumerate(many)]


def test_medians_places_and_who_was_first() -> None:
    found = placed(lanes(slow=[20.0, 21.0, 22.0], fast=[9.0, 10.0, 30.0], never=[None] * 3), TARGET)
    assert [row.repeats.label for row in found] == ["fast", "slow", "never"]
    assert [row.first for row in found] == [2, 1, 0]
    assert found[0].repeats.median_seconds == 10.0
    low, high = found[0].repeats.interval_seconds
    assert (low, high) == (9.0, 30.0)


def test_lanes_whose_order_is_not_certain_share_a_place() -> None:
    found = placed(lanes(a=[10.0, 12.0, 11.0], b=[10.5, 11.5, 12.5], c=[30.0, 31.0, 32.0]), TARGET)
    assert [(row.place, row.tied) for row in found] == [(1, True), (1, True), (3, False)]
    said = plain(repeats_headline(found, TARGET))
    assert said.startswith("`a`, `b` are tied")


def test_a_clear_order_is_said() -> None:
    found = placed(lanes(a=[10.0, 10.0, 11.0], b=[20.0, 21.0, 19.0]), TARGET)
    assert [(row.place, row.tied) for row in found] == [(1, False), (2, False)]
    said = plain(repeats_headline(found, TARGET))
    assert said == (
        "`a` reached accuracy ≥ 0.9 first, in 10.0 s (the median of 3 runs); 2.0× sooner than `b`."
    )


def test_a_run_that_never_reaches_it_counts_as_forever() -> None:
    (found,) = placed(lanes(a=[10.0, None, None]), TARGET)
    assert found.repeats.reached == 1
    assert found.repeats.median_seconds == float("inf")
    assert "1 of 3 runs" in plain(repeats_headline([found], TARGET))


def test_lanes_that_nobody_repeated_are_no_repeats() -> None:
    assert not are_repeated([lane("a", 0, 1.0), lane("b", 0, 2.0)])
    assert are_repeated(lanes(a=[1.0, 2.0]))
    assert labels(lanes(a=[1.0, 2.0])) == ["a (seed 0)", "a (seed 1)"]


def test_the_report_has_all_seeds(tmp_path: Path) -> None:
    both = lanes(a=[10.0, 10.0, 11.0], b=[20.0, 21.0, None])
    write_report(tmp_path, both, TARGET, {})
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert [row["label"] for row in summary["repeats"]] == ["a", "b"]
    assert [run["seconds_to_target"] for run in summary["repeats"][1]["seeds"]] == [
        20.0,
        21.0,
        None,
    ]
    assert len(summary["lanes"]) == 2
    assert summary["headline"].startswith("`a` reached")
    page = (tmp_path / "report.html").read_text()
    assert "All seeds" in page
    assert "6 runs" in page
