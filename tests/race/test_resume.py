"""Races that go on: with what was missing, with more lanes, with more seeds."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from farandole.cli import main
from farandole.race.runner import Entry, RaceConfig
from farandole.report.lane import Lane
from farandole.report.metrics import FILE_NAME

Run = tuple[str, int, float | None]
"""A lane, a seed, and a budget."""
Race = Callable[..., tuple[int, list[Run]]]

SPEED = {"allreduce": 3.0, "local:every=8": 1.0, "daso": 2.0, "lagged": 4.0, "adacomm": 5.0}


def write_metrics(folder: Path, seed: int, lane: Lane, seconds: float, end: float) -> None:
    """Reaches 0.9 after so many seconds, if it runs so long."""
    folder.mkdir(parents=True, exist_ok=True)
    start = {"event": "start", "sync": lane.sync, "size": 2, "seed": seed, "script": "train.py"}
    records: list[dict[str, object]] = [start]
    counters = {"samples": 10, "steps": 1, "waited_seconds": 0.0, "bytes_sent": 5}
    for at in range(1, 12):
        if at * seconds / 10 <= end:
            values = {"accuracy": 0.9 if at == 10 else 0.09 * at}
            records.append(
                {"event": "log", "time": at * seconds / 10, **counters, "metrics": values}
            )
    text = "".join(json.dumps(record) + "\n" for record in records)
    (folder / FILE_NAME).write_text(text)


@pytest.fixture
def race(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Race]:
    """Runs `farandole race …` with lanes that take no time: its exit code, and what it ran."""
    from farandole.race import runner
    from farandole.report.history import read_history

    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    ran: list[Run] = []
    broken: set[tuple[str, int]] = set()

    def pretend(config: RaceConfig, entry: Entry, number: int) -> Iterator[Lane]:
        lane = config.lane(entry)
        ran.append((lane.name, config.seed, config.budget_seconds))
        if (lane.name, config.seed) in broken:
            raise KeyboardInterrupt
        folder = config.folder / (runner.folder_name(number, lane) + config.folder_suffix)
        seconds = SPEED[lane.name] + config.seed
        end = min(config.budget_seconds or 100.0, seconds if config.stop_at else 100.0)
        write_metrics(folder, config.seed, lane, seconds, end)
        lane = replace(lane, outcome="ok", history=read_history(folder / FILE_NAME))
        enough = config.enough(lane.history, end + 1)
        yield replace(lane, outcome="stopped", problem=enough) if enough else lane

    def run(*arguments: str, breaks: tuple[tuple[str, int], ...] = ()) -> tuple[int, list[Run]]:
        ran.clear()
        broken.clear()
        broken.update(breaks)
        monkeypatch.setattr(sys, "argv", ["farandole", *arguments])
        with pytest.raises(SystemExit) as end:
            main()
        return int(end.value.code or 0), list(ran)

    monkeypatch.setattr("farandole.race.runner.run_lane", pretend)
    before = signal.getsignal(signal.SIGTERM)
    yield run
    signal.signal(signal.SIGTERM, before)


BEGIN = ("race", "-n", "2", "--pretend-hosts", "2", "--target", "accuracy=0.9")
TWO = ("--sync", "allreduce", "--sync", "local:every=8")


def folder_of(tmp_path: Path) -> Path:
    (found,) = tmp_path.glob("runs/race-*")
    return found


def repeats(folder: Path) -> dict[str, list[int]]:
    summary = json.loads((folder / "summary.json").read_text())
    return {row["label"]: [run["seed"] for run in row["seeds"]] for row in summary["repeats"]}


def test_every_lane_runs_with_every_seed(race: Race, tmp_path: Path) -> None:
    code, ran = race(*BEGIN, *TWO, "--seeds", "2", "--seed", "5", "train.py")
    assert code == 0
    assert ran == [(sync, seed, None) for seed in (5, 6) for sync in ("allreduce", "local:every=8")]
    assert repeats(folder_of(tmp_path)) == {"local:every=8": [5, 6], "allreduce": [5, 6]}


def test_an_interrupted_race_goes_on_where_it_was(
    race: Race, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, ran = race(*BEGIN, *TWO, "--seeds", "2", "train.py", breaks=(("local:every=8", 0),))
    assert code == 130
    assert len(ran) == 2
    folder = folder_of(tmp_path)
    assert f"farandole race --resume {folder.relative_to(tmp_path)}" in capsys.readouterr().out
    code, ran = race("race", "--resume", str(folder))
    assert code == 0
    assert ran == [("local:every=8", 0, None), ("allreduce", 1, None), ("local:every=8", 1, None)]
    assert repeats(folder) == {"local:every=8": [0, 1], "allreduce": [0, 1]}
    assert race("race", "--resume", str(folder)) == (0, []), "nothing is missing"


def test_an_old_race_gets_more_lanes_and_seeds(race: Race, tmp_path: Path) -> None:
    race(*BEGIN, *TWO, "train.py")
    folder = folder_of(tmp_path)
    code, ran = race("race", "--resume", str(folder), "--lane", "daso", "--seeds", "2")
    assert code == 0
    added = [("allreduce", 1, None), ("local:every=8", 1, None), ("daso", 1, None)]
    assert ran == [("daso", 0, None), *added]
    assert repeats(folder) == {"local:every=8": [0, 1], "daso": [0, 1], "allreduce": [0, 1]}


def test_a_lane_stops_at_the_target_and_at_its_budget(race: Race, tmp_path: Path) -> None:
    code, _ = race(*BEGIN, *TWO, "--stop-at-target", "--budget", "2", "train.py")
    assert code == 0
    lanes = json.loads((folder_of(tmp_path) / "summary.json").read_text())["lanes"]
    assert {lane["label"]: (lane["outcome"], lane["problem"]) for lane in lanes} == {
        "local:every=8": ("stopped", "stopped at the target, accuracy ≥ 0.9"),
        "allreduce": ("stopped", "stopped after its budget of 2 s"),
    }


def test_halving_gives_the_better_half_twice_the_time(race: Race, tmp_path: Path) -> None:
    syncs = [word for sync in SPEED for word in ("--sync", sync)]
    code, ran = race(*BEGIN, *syncs, "--halve", "--budget", "2", "train.py")
    assert code == 0
    assert [run for run in ran if run[2] == 0.5] == [(sync, 0, 0.5) for sync in SPEED]
    assert [sync for sync, _, budget in ran if budget == 1.0] == [
        "allreduce", "local:every=8", "daso",
    ]  # fmt: skip
    assert [sync for sync, _, budget in ran if budget == 2.0] == ["daso"], "the other was done"


def test_races_are_drawn_again_merged_and_compared(
    race: Race, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    race(*BEGIN, *TWO, "train.py", "--runs")
    first = folder_of(tmp_path).rename(tmp_path / "first")
    race(*BEGIN, *TWO, "--seed", "1", "train.py", "--runs")
    second = folder_of(tmp_path).rename(tmp_path / "second")
    race(*BEGIN, *TWO, "train.py", "--other")
    third = folder_of(tmp_path).rename(tmp_path / "third")
    assert race("report", str(first), "--target", "accuracy=0.5")[0] == 0
    assert json.loads((first / "summary.json").read_text())["target"]["value"] == 0.5
    assert race("report", str(first), str(second), "--out", "merged")[0] == 0
    assert repeats(tmp_path / "merged") == {"local:every=8": [0, 1], "allreduce": [0, 1]}
    assert race("report", str(first), str(third), "--out", "compared")[0] == 0
    lanes = json.loads((tmp_path / "compared/summary.json").read_text())["lanes"]
    assert {lane["label"] for lane in lanes} == {
        f"{sync} @ {folder}"
        for sync in ("allreduce", "local:every=8")
        for folder in ("first", "third")
    }


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--seeds", "0", "train.py"), "--seeds '0'"),
        (("--seeds", "1,2,1", "train.py"), "seed 1 is asked for twice"),
        (("--budget", "-1", "train.py"), "--budget -1"),
        (("--halve", "train.py"), "--budget SECONDS"),
        (("--lane", "a/b/c", "train.py"), "--lane 'a/b/c'"),
        (("--lane", "stagse=2", "train.py"), "--lane 'stagse=2'"),
        ((), "which script"),
    ],
)
def test_bad_input(
    race: Race, arguments: tuple[str, ...], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert race(*BEGIN, *TWO, *arguments) == (2, [])
    assert complaint in capsys.readouterr().err


def test_stop_at_target_needs_one(race: Race, capsys: pytest.CaptureFixture[str]) -> None:
    assert race("race", "-n", "2", *TWO, "--stop-at-target", "train.py") == (2, [])
    assert "say what the target is" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--link", "1gbit"), "--link 1gbit: the race in"),
        (("-n", "3"), "--workers 3"),
        (("other.py",), "ran 'train.py', and this is 'other.py'"),
    ],
)
def test_lanes_that_could_not_be_compared_are_refused(
    race: Race,
    tmp_path: Path,
    arguments: tuple[str, ...],
    complaint: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    race(*BEGIN, *TWO, "train.py")
    (tmp_path / "other.py").touch()
    assert race("race", "--resume", str(folder_of(tmp_path)), *arguments) == (2, [])
    assert complaint in capsys.readouterr().err


def test_folders_without_a_race(
    race: Race, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert race("race", "--resume", str(tmp_path))[0] == 2
    assert "has no race.json" in capsys.readouterr().err
    assert race("report", str(tmp_path))[0] == 2
    said = capsys.readouterr().err
    assert "neither a race" in said
    assert "Those are in runs/" in said
    race(*BEGIN, *TWO, "train.py")
    capsys.readouterr()
    assert race("report", str(tmp_path / "runs"))[0] == 2
    folder = folder_of(tmp_path)
    assert f"Give folders in it, such as {folder}." in capsys.readouterr().err
    before = (folder / "report.html").read_text()
    assert race("report", str(folder), "--target", "acuracy=0.9")[0] == 2
    assert "Did you mean 'accuracy'?" in capsys.readouterr().err
    assert (folder / "report.html").read_text() == before
    (tmp_path / "race.json").write_text('{"format": 1, "command"')
    assert race("report", str(tmp_path))[0] == 2
    assert "cannot be read" in capsys.readouterr().err


def test_the_price_of_a_race_stays_with_it(race: Race, tmp_path: Path) -> None:
    race(*BEGIN, *TWO, "--price", "3600", "train.py")
    folder = folder_of(tmp_path)

    def costs() -> list[float]:
        summary = json.loads((folder / "summary.json").read_text())
        return [row["cost_to_target"] for row in summary["lanes"]]

    assert costs() == [2.0, 6.0]  # 2 workers for 1 s and for 3 s
    race("report", str(folder))
    assert costs() == [2.0, 6.0]
    race("report", str(folder), "--price", "7200")
    assert costs() == [4.0, 12.0]
