"""How long the lanes of a race take to start, forked from one process and started afresh.

The same race, with and without FARANDOLE_FORK=0, taking turns. Start-up is what the race itself
shows for each lane: from the start of its processes until fd.init() was done. Torch is imported
once before the lanes are forked; that time, and the whole race's, is measured too.

    python benchmarks/race_startup.py
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import save, spread

DIGITS = Path(__file__).parents[1] / "examples" / "digits.py"
LANES = ("--sync", "allreduce", "--sync", "allreduce:bucket_mib=0.05", "--serial")
SIDES = {"forked": {}, "fresh": {"FARANDOLE_FORK": "0"}}


def race(folder: Path, variables: dict[str, str], epochs: int) -> dict[str, list[float]]:
    """One race: the start-up of each lane, the import before them, and the whole time."""
    command = [sys.executable, "-m", "farandole", "race", "-n", "2", *LANES]
    command += ["--runs", str(folder), str(DIGITS), "--epochs", str(epochs)]
    begin = time.perf_counter()
    done = subprocess.run(
        command, env={**os.environ, **variables}, check=True, capture_output=True, text=True
    )
    whole = time.perf_counter() - begin
    (summary,) = folder.glob("race-*/summary.json")
    lanes = json.loads(summary.read_text())["lanes"]
    imported = re.search(r"once for all lanes: ([\d.]+) s", done.stdout)
    return {
        "startup_of_a_lane": [lane["startup_seconds"] for lane in lanes],
        "import_before_the_lanes": [float(imported[1])] if imported else [],
        "whole_race": [whole],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=8, help="as `make race` has them")
    args = parser.parse_args()
    seconds: dict[str, dict[str, list[float]]] = {side: {} for side in SIDES}
    for _ in range(args.repeats):
        for side, variables in SIDES.items():
            with tempfile.TemporaryDirectory() as folder:
                for name, values in race(Path(folder), variables, args.epochs).items():
                    seconds[side].setdefault(name, []).extend(values)
    figures = {
        side: {name: spread(values) for name, values in found.items() if values}
        for side, found in seconds.items()
    }
    medians = [figures[side]["startup_of_a_lane"]["median"] for side in ("fresh", "forked")]
    save(
        "race_startup",
        {
            "ratio": medians[0] / medians[1],
            "lanes": 3,
            "seconds": figures,
            "repeats": args.repeats,
        },
    )
    print(f"start-up of a lane: {medians[0]:.2f} s afresh, {medians[1]:.2f} s forked")
    print(f"ratio {medians[0] / medians[1]:.2f}")


if __name__ == "__main__":
    main()
