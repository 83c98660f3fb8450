"""Runs the sides alternately, each in a process of its own, and compares their times."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from common import spread

ALGORITHMS = ("kmeans", "pca", "lasso", "logistic")
SIDE = Path(__file__).parent / "side.py"


def commands(
    workers: int, dask_python: str | None, heat_python: str | None
) -> dict[str, list[str]]:
    """How each side is started. Farandole with threads (0 processes), and with processes."""
    found = {
        "farandole, threads": [sys.executable, str(SIDE), "farandole", "0"],
        "farandole, processes": [sys.executable, str(SIDE), "farandole", str(workers)],
        "scikit-learn": [sys.executable, str(SIDE), "sklearn", str(workers)],
    }
    if dask_python:
        found["dask-ml"] = [dask_python, str(SIDE), "dask-ml", str(workers)]
    if heat_python:
        started = ["mpirun", "--oversubscribe", "-n", str(workers), heat_python]
        found["HeAT"] = [*started, str(SIDE), "heat", "1"]
    return found


def run_side(command: list[str], algorithm: str, folder: Path, threads: int) -> dict[str, Any]:
    """Its result, or why there is none."""
    *words, library, workers = command
    environment = dict(os.environ)
    if library == "farandole":
        environment["PYTHONPATH"] = str(Path(__file__).parents[2])
    each = 1 if library in ("heat", "dask-ml") else threads
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        environment[name] = str(each)
    done = subprocess.run(
        [*words, library, algorithm, str(folder), workers],
        capture_output=True,
        text=True,
        timeout=3600,
        env=environment,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if done.returncode or not lines:
        reason = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()[-1]
        return {"failed": reason[-300:]}
    # Several processes of one side: the slowest counts.
    found: dict[str, Any] = max(
        (json.loads(line.removeprefix("RESULT ")) for line in lines),
        key=lambda each: each["seconds"],
    )
    return found


def compare(
    sides: dict[str, list[str]],
    algorithms: tuple[str, ...],
    folder: Path,
    rounds: int,
    threads: int,
) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for algorithm in algorithms:
        found: dict[str, list[dict[str, Any]]] = {name: [] for name in sides}
        for turn in range(rounds):
            names = list(sides)
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                one = run_side(sides[name], algorithm, folder, threads)
                found[name].append(one)
                print(algorithm, name, one, flush=True)
        result[algorithm] = _judged(found)
    return result


def _judged(found: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    judged: dict[str, Any] = {}
    for name, runs in found.items():
        good = [run for run in runs if "seconds" in run]
        if not good:
            judged[name] = {"failed": runs[-1]["failed"]}
            continue
        judged[name] = {
            "seconds": spread([run["seconds"] for run in good]),
            "objective": good[-1]["objective"],
            "peak_rss_mib": max(run["peak_rss_mib"] for run in good),
        }
    others = [
        each["seconds"]["median"]
        for name, each in judged.items()
        if "seconds" in each and not name.startswith("farandole")
    ]
    ours = [
        each["seconds"]["median"]
        for name, each in judged.items()
        if "seconds" in each and name.startswith("farandole")
    ]
    ratio = min(ours) / min(others) if ours and others else None
    return {"sides": judged, "ratio_to_the_fastest": ratio}
