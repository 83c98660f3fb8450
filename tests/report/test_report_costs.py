"""Money and energy: right where they are known, left out and said where they are not."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from farandole.errors import UserError
from farandole.race.options import check_price
from farandole.report import units
from farandole.report.axes import known_axes
from farandole.report.history import read_history
from farandole.report.lane import Lane
from farandole.report.page import page
from farandole.report.plots.curves import curve
from farandole.report.standing import Results
from farandole.report.summary import columns, cost_notes, summary_json
from farandole.report.target import Target

MakeLane = Callable[..., Lane]
TARGET = Target.parse("accuracy=0.9")


def with_energy(lane: Lane, joules_each: float) -> Lane:
    history = lane.history
    points = tuple(
        replace(point, energy_joules=joules_each * at)
        for at, point in enumerate(history.points, start=1)
    )
    start = {**history.start, "energy": "1 zones of RAPL"}
    return replace(lane, history=replace(history, start=start, points=points, last=points[-1]))


def cells(results: Results) -> dict[str, tuple[str, ...]]:
    return {column.title: column.cells for column in columns(results, results.standings)}


def test_cost_is_price_times_workers_times_hours(make_lane: MakeLane) -> None:
    lane = replace(make_lane("daso", [0.5, 0.95, 0.99], seconds=1800.0, workers=4), price=2.5)
    results = Results((lane,), TARGET)
    assert cells(results)["cost to target"] == ("10.00",)
    assert cells(results)["cost in all"] == ("15.00",)
    (row,) = json.loads(summary_json(results))["lanes"]
    assert (row["cost_to_target"], row["cost"], row["price_per_worker_hour"]) == (10, 15, 2.5)
    assert row["energy_joules"] is None


def test_energy_to_the_target_and_in_all(make_lane: MakeLane) -> None:
    lane = with_energy(make_lane("daso", [0.5, 0.95, 0.99]), 700.0)
    results = Results((lane, make_lane("a", [0.1])), TARGET)
    assert cells(results)["energy to target"] == ("1.4 kJ", units.NONE)
    assert cells(results)["energy in all"] == ("2.1 kJ", units.NONE)
    (first, _) = json.loads(summary_json(results))["lanes"]
    assert (first["energy_joules_to_target"], first["energy_joules"]) == (1400.0, 2100.0)


def test_what_is_not_known_has_no_column_and_the_reason_is_said_once(make_lane: MakeLane) -> None:
    lanes = [make_lane(name, [0.95]) for name in ("a", "b")]
    start = {"no_energy": "this machine has no RAPL"}
    lanes = [replace(lane, history=replace(lane.history, start=start)) for lane in lanes]
    results = Results(tuple(lanes), TARGET)
    assert not [title for title in cells(results) if "energy" in title or "cost" in title]
    assert cost_notes(results) == ["energy is not measured: this machine has no RAPL"]
    assert page(results).count("this machine has no RAPL") == 1
    assert known_axes(results) == ["time", "samples", "bytes"]


def test_curves_against_every_cost(make_lane: MakeLane) -> None:
    lane = replace(with_energy(make_lane("daso", [0.5, 0.95], workers=2), 10.0), price=1800.0)
    results = Results((lane,), TARGET)
    assert known_axes(results) == ["time", "samples", "bytes", "energy", "money"]
    expected = {"bytes": [1000, 2000], "energy": [10, 20], "money": [1, 2]}
    for axis in known_axes(results)[2:]:
        (axes,) = curve(results, "accuracy", axis).axes
        (line,) = (line for line in axes.get_lines() if line.get_label() == "lane 0")
        assert list(line.get_xdata()) == expected[axis]


def test_the_energy_of_a_resumed_run_goes_on(tmp_path: Path) -> None:
    counters = '"time":2,"samples":9,"steps":1,"waited_seconds":0,"bytes_sent":0'
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        '{"event":"start"}\n'
        f'{{"event":"log",{counters},"energy_joules":5,"metrics":{{"a":1}}}}\n'
        '{"event":"start"}\n'
        f'{{"event":"log",{counters},"energy_joules":2,"metrics":{{"a":1}}}}\n'
        f'{{"event":"log",{counters},"metrics":{{"a":1}}}}\n'
    )
    history = read_history(path)
    assert [point.energy_joules for point in history.points] == [5, 7, None]


@pytest.mark.parametrize("price", [-1.0, float("nan"), float("inf")])
def test_a_price_that_is_none(price: float) -> None:
    with pytest.raises(UserError, match=r"--price .*: give the price of a worker-hour"):
        check_price(price)


def test_figures_are_short() -> None:
    assert [units.joules(v) for v in (0.5, 1500.0, 2.5e6, 3e9)] == [
        "0.5 J", "1.5 kJ", "2.5 MJ", "3 GJ",
    ]  # fmt: skip
    assert [units.money(v) for v in (0.01234, 3.0, 1234.5)] == ["0.0123", "3", "1,234.50"]
