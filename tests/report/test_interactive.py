"""What the page's script is given: the numbers, timelines from traces, and memory."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from farandole.report.interactive.charts import charts, memory
from farandole.report.interactive.data import MOST_POINTS, embedded, page_data
from farandole.report.interactive.timeline import read_timeline, timeline_of
from farandole.report.lane import Lane
from farandole.report.standing import Results
from farandole.report.target import Target

MakeLane = Callable[..., Lane]
TARGET = Target.parse("accuracy=0.9")


def test_every_lane_has_its_points_on_every_axis(make_lane: MakeLane) -> None:
    lane = replace(make_lane("daso", [0.1, math.nan, 0.95], seconds=1.5), price=1200.0)
    data = page_data(Results((lane,), TARGET))
    assert [axis["key"] for axis in data["axes"]] == ["time", "samples", "bytes", "money"]
    (drawn,) = data["lanes"]
    assert drawn["logs"]["across"]["time"] == [1.5, 3.0, 4.5]
    assert drawn["logs"]["across"]["money"] == [1.0, 2.0, 3.0]
    assert drawn["logs"]["metric"] == {"accuracy": [0.1, None, 0.95]}
    assert drawn["reached"]["samples"] == 300
    assert json.loads(embedded(data)) == data


def test_long_runs_are_thinned_but_keep_their_end_and_the_target(make_lane: MakeLane) -> None:
    values = [0.1] * 5000
    values[3333] = 0.97
    data = page_data(Results((make_lane("long", values),), TARGET))
    kept = data["lanes"][0]["logs"]
    assert len(kept["across"]["time"]) <= MOST_POINTS + 2
    assert 0.97 in kept["metric"]["accuracy"]
    assert kept["across"]["time"][-1] == 5000


def test_a_decision_holds_until_the_next(make_lane: MakeLane) -> None:
    notes = [(0.0, {"period": 8.0}), (1.0, {"loss": 0.3}), (2.0, {"period": "?"})]
    data = page_data(Results((make_lane("adacomm", [0.5, 0.6], notes=notes),), TARGET))
    assert data["lanes"][0]["notes"]["note"]["period"] == [8.0, 8.0, None]
    assert [panel["key"] for panel in data["panels"] if panel["open"]] == ["accuracy", "period"]


def test_a_target_nobody_reached_is_said(make_lane: MakeLane) -> None:
    said = "No run reached accuracy ≥ 0.9."
    assert said in charts(Results((make_lane("a", [0.5]),), TARGET))
    assert said not in charts(Results((make_lane("a", [0.95]),), TARGET))


def span(rank: int, name: str, category: str, begin: float, end: float, row: int = 1) -> Any:
    return {
        "name": name, "cat": category, "ph": "X", "pid": rank, "tid": row,
        "ts": begin * 1e6, "dur": (end - begin) * 1e6, "args": {},
    }  # fmt: skip


def thread(rank: int, row: int, name: str) -> Any:
    return {"name": "thread_name", "ph": "M", "pid": rank, "tid": row, "args": {"name": name}}


def test_who_waits_for_whom() -> None:
    events = [
        *(thread(rank, 1, "main") for rank in range(2)),
        *(thread(rank, 2, "comm") for rank in range(2)),
        span(0, "backward", "compute", 0.0, 9.0),
        span(0, "waiting for gradients", "wait", 2.0, 8.0, 3),
        span(0, "all_reduce", "comm", 1.0, 8.0, 2),
        span(1, "backward", "compute", 0.0, 9.0),
        span(1, "waiting for gradients", "wait", 6.0, 8.0, 3),
        span(1, "waiting for stage 0", "wait", 10.0, 13.0),
    ]
    timeline = timeline_of(events)
    assert timeline["waits"] == [
        "Rank 0 waited 6.0 s for gradients, 4.0 s of it until rank 1 had computed its own.",
        "Rank 1 waited 2.0 s for gradients.",
        "Rank 1 waited 3.0 s for stage 0.",
    ]
    first, second = timeline["rows"]
    assert [s[3] for s in first["spans"]] == ["backward", "waiting for gradients"], "no background"
    assert second["rank"] == 1


def test_a_long_trace_is_shown_in_part() -> None:
    events = [span(0, "forward", "compute", at, at + 0.5) for at in range(10_000)]
    timeline = timeline_of(events)
    assert 50 < len(timeline["rows"][0]["spans"]) < 200
    assert 4000 < timeline["begin"] < timeline["end"] < 6000


def test_a_trace_that_cannot_be_read_is_said(make_lane: MakeLane, tmp_path: Path) -> None:
    lane = replace(make_lane("a", [0.5]), folder=tmp_path)
    assert read_timeline(lane) is None
    (tmp_path / "trace.json").write_text('{"traceEvents": [')
    timeline = read_timeline(lane)
    assert timeline is not None
    assert "cannot be read" in timeline["waits"][0]
    assert timeline["rows"] == []


def test_memory_of_each_rank(make_lane: MakeLane, tmp_path: Path) -> None:
    folder = tmp_path / "memory"
    folder.mkdir()
    lines = ['{"rank": 1, "process_bytes": 100000000, "device_bytes": null}\n'] * 2
    (folder / "rank-1.jsonl").write_text("".join(lines) + '{"rank": 1, "process_by')
    (folder / "rank-0.jsonl").write_text(lines[0].replace("1,", "0,", 1).replace("null", "5e9"))
    (folder / "rank-2.jsonl").write_text("torn")
    lane = replace(make_lane("<b>", [0.5]), folder=tmp_path)
    html = memory(Results((lane,)))
    assert html.index("rank 0") < html.index("rank 1")
    assert "100 MB, GPU 5 GB" in html
    assert "rank 2" not in html
    assert "<b>" not in html
    assert memory(Results((make_lane("a"),))) == ""
