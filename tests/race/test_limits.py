"""Races whose lanes would never end: budgets, halving, and a target that stops them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

# Never ends by itself. Its accuracy comes near to a limit that its strategy decides.
ENDLESS = """
import itertools, time, farandole as fd
run = fd.init()
best = {"allreduce:bucket_mib=1": 0.3, "allreduce:bucket_mib=2": 0.8}
limit = best.get(str(run.settings.sync), 0.6)
for step in itertools.count(1):
    run.log(accuracy=limit * (1 - 0.5**step))
    time.sleep(0.02)
"""
LANES = ("allreduce:bucket_mib=1", "allreduce:bucket_mib=2", "allreduce:bucket_mib=4")


def race_folder(folder: Path) -> Path:
    (found,) = folder.glob("runs/race-endless-*")
    return found


def test_halving_by_budgets_towards_a_target_nobody_reaches(sandbox: Any) -> None:
    sandbox.script("endless.py", ENDLESS)
    syncs = [word for lane in LANES for word in ("--sync", lane)]
    done = sandbox.farandole(
        "race", "-n", "1", *syncs, "--halve", "--budget", "3", "--target", "accuracy=0.99",
        "endless.py", COLUMNS="200",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    folder = race_folder(sandbox.folder)
    runs = json.loads((folder / "race.json").read_text())["runs"]
    given = {run["number"]: run["budget_seconds"] for run in runs}
    assert sorted(given.values()) == [1.5, 3.0, 3.0], "the better two of three got twice the time"
    for run in runs:
        assert run["outcome"] == "stopped"
        assert run["problem"] == f"stopped after its budget of {run['budget_seconds']:g} s"
    summary = json.loads((folder / "summary.json").read_text())
    best = {lane["label"]: lane["best"] for lane in summary["lanes"]}
    if None not in best.values():  # a slow machine may not come to a first log in so short a time
        (out,) = (LANES[number - 1] for number, seconds in given.items() if seconds == 1.5)
        assert best[out] == min(best.values())
        assert "No run reached accuracy ≥ 0.99" in done.stdout
        assert "No run reached accuracy ≥ 0.99" in (folder / "report.html").read_text()


def test_a_lane_is_stopped_at_the_target(sandbox: Any) -> None:
    sandbox.script("endless.py", ENDLESS)
    done = sandbox.farandole(
        "race", "-n", "1", "--serial", "--stop-at-target", "--target", "accuracy=0.5", "endless.py"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (run,) = json.loads((race_folder(sandbox.folder) / "race.json").read_text())["runs"]
    assert run["problem"] == "stopped at the target, accuracy ≥ 0.5"
    assert "reached accuracy ≥ 0.5" in done.stdout
