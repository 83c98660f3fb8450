"""The parts of `benchmarks/race_classics.py`: every race may start, and what is kept is drawn."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

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
        assert (ROOT / race.script).is_file()


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


@pytest.mark.parametrize(("compute", "share"), [(1e6, 1 / 3), (1e-9, 1 / 2)])
def test_what_a_period_that_changes_can_gain(compute: float, share: float) -> None:
    """docs/classics.md says so: a third to a half of the meetings' term, and no more."""
    from classics.theory import Bound

    bound = Bound(compute, meeting=0.05, a=1000.0, b=0.0, c=1e-6)
    seconds = 100.0
    period = bound.best_period(seconds)
    gain = bound.error(seconds, period) - bound.ideal(seconds, 10**9, moments=20_000)
    assert gain == pytest.approx(share * bound.a * bound.meeting / seconds / period, rel=0.01)


def run_of(lane: str, seed: int, fall: float) -> dict[str, Any]:
    """A run that has logged eight times, once a second."""
    points = [
        {
            **{"seconds": float(at), "samples": 100 * at, "steps": 10 * at},
            **dict.fromkeys(("loss", "test_loss", "error", "accuracy"), 1 / at + fall),
        }
        for at in range(1, 9)
    ]
    return {
        **{"lane": lane, "seed": seed, "workers": 2, "outcome": "ok", "problem": ""},
        **{"seconds_to_target": 4.0 + seed, "waited_seconds": 0.1, "bytes_sent": 10**6},
        **points[-1],
        "points": points,
        "periods": [{"seconds": 4.0, "period": 8.0}] if lane.startswith("adacomm") else [],
    }


def test_figures_and_the_page_are_made_of_what_is_kept(tmp_path: Path) -> None:
    from classics.figures import FIGURES, draw_all
    from classics.plan import PIECES
    from classics.text import page

    environment = {"cpus": 2, "machine": "any", "torch": "2", "date": "today"}
    pieces: dict[str, Any] = {}
    for piece, races in PIECES.items():
        found = {
            race.name: {
                **{"target": race.target, "link": "1 Gbit/s"},
                "runs": [
                    run_of(lane, seed, 0.1 * at)
                    for at, lane in enumerate(race.lanes)
                    for seed in range(2)
                ],
            }
            for race in races
        }
        pieces[piece] = {"races": found, "environment": environment}
    pieces["strategies"]["races"]["strategies"]["runs"][0] |= {
        **{"outcome": "failed", "problem": "it <broke>", "points": [], "seconds": 0.0},
        "seconds_to_target": None,
    }
    folder = tmp_path / "classics"
    folder.mkdir()
    drawn = list(draw_all(pieces, folder))
    assert [path.stem for path in drawn] == list(FIGURES)
    assert all(path.read_bytes().startswith(b"<?xml") for path in drawn)
    text = page(pieces, folder)
    assert "`allreduce` failed: it <broke>" in text
    assert "AdaComm ends at 3.76" in text
    assert all(f"classics/{path.name}" in text for path in drawn)
    assert "race.html" not in text, "it is not there"
    assert page({}, folder).count("##") == 0, "nothing was run"


def test_the_page_in_the_docs_is_that_of_the_results() -> None:
    from classics.text import page

    kept = (ROOT / "benchmarks/results").glob("race_classics_*.json")
    pieces = {
        path.stem.removeprefix("race_classics_"): json.loads(path.read_text()) for path in kept
    }
    made = page(pieces, ROOT / "docs/classics")
    assert (ROOT / "docs/classics.md").read_text() == made, "race_classics.py draw writes it anew"
