"""Kills workers of a job that runs, one now and then, and reads how far the job has come."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

_START_SECONDS = 300.0
_END_SECONDS = 200.0


@dataclass
class Course:
    """What became of a job. Its time is cut into windows; in every second one, workers die."""

    calm_steps: list[int]  # how far it came in each window without a kill
    struck_steps: list[int]
    recoveries: list[float]  # from each kill to the next step


def run_struck(
    command: Sequence[str],
    folder: Path,
    windows: int,
    seconds: float,
    *,
    kills: int,
    environment: Mapping[str, str] | None = None,
    seed: int = 0,
) -> Course:
    """Runs `command` for so many windows of so many seconds, from its first step on.

    In every second window `kills` workers die, evenly spread from its beginning on.
    """
    folder.mkdir(parents=True)
    output = folder / "output"
    with output.open("w") as log:
        job = subprocess.Popen(
            command,
            stdout=log,
            stderr=log,
            start_new_session=True,
            env={**os.environ, **(environment or {})},
        )
    try:
        began = _first_step(job, folder, output)
        due = [
            began + (window + kill / kills) * seconds
            for window in range(1, windows, 2)
            for kill in range(kills)
        ]
        struck = _strike(job, folder, due, random.Random(seed))
        job.wait(max(0.0, began + windows * seconds - time.monotonic()) + _END_SECONDS)
    finally:
        if job.poll() is None:
            job.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                job.wait(30)
            job.kill()
    assert job.returncode == 0, output.read_text()[-5000:]
    times = steps_taken(folder)
    borders = [
        max((step for step, when in times if when <= began + at * seconds), default=0)
        for at in range(windows + 1)
    ]
    made = [after - before for before, after in pairwise(borders)]
    recoveries = [min(when for _, when in times if when > kill + 0.02) - kill for kill in struck]
    return Course(made[::2], made[1::2], recoveries)


def steps_taken(folder: Path) -> list[tuple[int, float]]:
    """Each step of each worker, and when."""
    lines = (json.loads(line) for file in folder.glob("steps-*") for line in whole_lines(file))
    return [(line[1], line[2]) for line in lines if line[0] == "stepped"]


def whole_lines(file: Path) -> list[str]:
    """Without one that its writer did not finish."""
    return [line for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]


def _first_step(job: subprocess.Popen[bytes], folder: Path, output: Path) -> float:
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline and job.poll() is None:
        with contextlib.suppress(FileNotFoundError, ValueError):
            return float((folder / "began").read_text())
        time.sleep(0.05)
    raise RuntimeError(f"no step was taken: {output.read_text()[-5000:]}")


def _strike(
    job: subprocess.Popen[bytes], folder: Path, due: Sequence[float], chance: random.Random
) -> list[float]:
    kills: list[float] = []
    for moment in due:
        while time.monotonic() < moment and job.poll() is None:
            time.sleep(0.01)
        if job.poll() is None:
            kills.append(_kill_one(folder, chance))
    return kills


def _kill_one(folder: Path, chance: random.Random) -> float:
    """One that has taken a step within the last seconds."""
    deadline = time.monotonic() + _END_SECONDS
    while time.monotonic() < deadline:
        now = time.monotonic()
        recent = {
            int((folder / file.name.replace("steps", "pid")).read_text())
            for file in folder.glob("steps-*")
            if time.time() - file.stat().st_mtime < 2.0
        }
        alive = sorted(pid for pid in recent if Path(f"/proc/{pid}").exists())
        if alive:
            os.kill(chance.choice(alive), signal.SIGKILL)
            return now
        time.sleep(0.05)
    raise RuntimeError(f"no worker has taken a step for {_END_SECONDS:g} s")
