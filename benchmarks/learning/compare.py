"""Runs the sides alternately, each in a process of its own, and compares their times."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from common import spread

ALGORITHMS = ("kmeans", "pca", "lasso", "logistic")
SIDE = Path(__file__).parent / "side.py"
_START_SECONDS = 60.0  # to import, and to read the data


def commands(
    workers: int, dtype: str, dask_python: str | None, heat_python: str | None
) -> tuple[dict[str, list[str]], dict[str, str]]:
    """How each side is started, and why some are not. Farandole with threads, with processes that
    each fit starts, and with processes that are kept."""
    ours = [sys.executable, str(SIDE), dtype, "farandole"]
    found = {
        "farandole, threads": [*ours, "threads"],
        "farandole, processes": [*ours, str(workers)],
        "farandole, kept processes": [*ours, f"kept {workers}"],
        "scikit-learn": [sys.executable, str(SIDE), dtype, "sklearn", str(workers)],
    }
    left_out = {}
    dask_python = dask_python or _here("dask_ml")
    if dask_python:
        found["dask-ml"] = [dask_python, str(SIDE), dtype, "dask-ml", str(workers)]
    else:
        left_out["dask-ml"] = "not installed here, and no --dask-python was given"
    heat_python = heat_python or _here("heat")
    if heat_python and shutil.which("mpirun"):
        started = ["mpirun", "--oversubscribe", "-n", str(workers), heat_python]
        found["HeAT"] = [*started, str(SIDE), dtype, "heat", "1"]
    elif heat_python:
        left_out["HeAT"] = "there is no mpirun"
    else:
        left_out["HeAT"] = "not installed here, and no --heat-python was given"
    return found, left_out


def _here(package: str) -> str | None:
    return sys.executable if importlib.util.find_spec(package) else None


def run_side(
    command: list[str], algorithm: str, folder: Path, threads: int, seconds: float
) -> dict[str, Any]:
    """Its result, or why there is none."""
    *words, library, workers = command
    environment = dict(os.environ)
    if library == "heat" and os.geteuid() == 0:
        environment |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    if library == "farandole":
        environment["PYTHONPATH"] = str(Path(__file__).parents[2])
    each = 1 if library in ("heat", "dask-ml") else threads
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        environment[name] = str(each)
    try:
        done = subprocess.run(
            [*words, library, algorithm, str(folder), workers],
            capture_output=True,
            text=True,
            timeout=seconds + _START_SECONDS,
            env=environment,
        )
    except subprocess.TimeoutExpired:
        return {"failed": f"took more than {seconds:g} s"}
    left_out = re.search(r"LEFT OUT: (.*)", done.stdout)
    if left_out:
        return {"failed": left_out[1]}
    lines = re.findall(r"RESULT (\{.*?\})", done.stdout)  # perhaps several on a line
    if done.returncode or not lines:
        reason = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()[-1]
        return {"failed": reason[-300:]}
    # Several processes of one side: the slowest counts.
    found: dict[str, Any] = max(
        map(json.loads, lines),
        key=lambda each: each["seconds"],
    )
    return found


def compare(
    sides: dict[str, list[str]],
    algorithms: tuple[str, ...],
    folder: Path,
    rounds: int,
    threads: int,
    seconds: float,
) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for algorithm in algorithms:
        found: dict[str, list[dict[str, Any]]] = {name: [] for name in sides}
        for turn in range(rounds):
            names = list(sides)
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                if found[name] and "failed" in found[name][-1]:
                    continue  # it would again
                one = run_side(sides[name], algorithm, folder, threads, seconds)
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
