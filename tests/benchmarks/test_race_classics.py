"""The parts of `benchmarks/race_classics.py`: every race may start, and what is kept is drawn."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from farandole.race.checks import check_entries
from farandole.race.lanes import read_lane

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))


def test_every_lane_is_one_that_a_race_takes() -> None:
    from classics.plan import PIECES

    for race in (race for races in PIECES.values() for race in races):
        entries = [read_lane(text, race.workers) for text in race.lanes]
        check_entries(entries, "2", "cpu", {})
        assert race.script.is_file()


def test_the_bound_is_found_again() -> None:
    from classics.theory import Bound, fit

    true = Bound(compute=0.01, meeting=0.05, a=40.0, b=0.3, c=0.002)
    runs = {}
    for period in (1, 4, 16, 64):
        steps = [round(seconds / true.step(period)) for seconds in range(1, 30)]
        points = [{"seconds": n * true.step(period), "steps": n} for n in steps]
        for point in points:
            point["loss"] = true.error(point["seconds"], period)
        runs[period] = [{**points[-1], "points": points}]
    found = fit(runs, after=1.0)
    assert (found.a, found.b, found.c) == pytest.approx((true.a, true.b, true.c))
    assert (found.compute, found.meeting) == pytest.approx((true.compute, true.meeting))
    # A period that never changes is a fixed one.
    assert found.adaptive(20.0, [(0.0, 16)]) == pytest.approx(found.error(20.0, 16))


def test_what_is_kept_can_be_drawn(tmp_path: Path) -> None:
    from classics.figures import FIGURES, draw_all

    kept = (ROOT / "benchmarks/results").glob("race_classics_*.json")
    pieces = {
        path.stem.removeprefix("race_classics_"): json.loads(path.read_text()) for path in kept
    }
    drawn = list(draw_all(pieces, tmp_path))
    assert [path.stem for path in drawn] == [piece for piece in FIGURES if piece in pieces]
    assert all(path.read_bytes().startswith(b"<?xml") for path in drawn)
