"""What every benchmark needs: where it ran, how to write a result down, how to start workers."""

from __future__ import annotations

import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def environment() -> dict[str, Any]:
    """The machine and the versions, so that a figure can be judged later."""
    import torch

    import farandole

    return {
        "date": time.strftime("%Y-%m-%d"),
        "machine": platform.machine(),
        "cpus": len(os.sched_getaffinity(0)),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "farandole": farandole.__version__,
        "load_average": [round(load, 1) for load in os.getloadavg()],
    }


def save(name: str, result: dict[str, Any], folder: Path = RESULTS) -> None:
    """Writes `results/<name>.json`, with the environment and the command."""
    folder.mkdir(parents=True, exist_ok=True)
    record = {
        "command": shlex.join(["python", *sys.argv]),
        "environment": environment(),
        **result,
    }
    path = folder / f"{name}.json"
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(record, indent=2) + "\n")
    temporary.replace(path)
    root = RESULTS.parent.parent
    print(f"result: {path.relative_to(root) if path.is_relative_to(root) else path}")


def restart_on_workers(workers: int, *, per_gpu: bool = False) -> None:
    """Runs this script again on `workers` workers and exits; returns in the workers themselves.

    `per_gpu`: all of them on the first GPU.
    """
    if "FARANDOLE_JOB" in os.environ:
        return
    count = ["--per-gpu" if per_gpu else "-n", str(workers)]
    arguments = ["-m", "farandole", "run", *count, *sys.argv]
    environ = {**os.environ, **({"CUDA_VISIBLE_DEVICES": "0"} if per_gpu else {})}
    sys.exit(subprocess.call([sys.executable, *arguments], env=environ))


def spread(values: list[float]) -> dict[str, float]:
    """Median and quartiles."""
    ordered = sorted(values)
    low, high = (ordered[round(share * (len(ordered) - 1))] for share in (0.25, 0.75))
    return {"quartile_1": low, "median": statistics.median(ordered), "quartile_3": high}
