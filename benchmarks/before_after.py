"""The ratios of other benchmarks in two checkouts, in turn: has a change made anything slower?

Each benchmark compares Farandole with something else, in the same processes, and so gives ratios
that survive a noisy machine. This runs the benchmark in the checkout from before the change and in
the one from after it, in turn, `--rounds` times. `change` is the median ratio after over the one
before, turned so that above 1 is slower. The target is at most 1.03. The benchmarks write their own
results into the `benchmarks/results` of the two checkouts, so give copies that nobody else uses.

    python benchmarks/before_after.py ../before ../after \\
        "startup.py --repeats 9" "comm.py --ranks 2 --sizes 4KiB:16MiB"
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common import save

SPEED_UPS = "comm.py"  # its ratios are how many times faster; those of all others, of times
TARGET = 1.03


def measured(checkout: Path, benchmark: str) -> dict[str, float]:
    """The ratios of one run, by their places in its results."""
    script, *arguments = shlex.split(benchmark)
    command = [sys.executable, f"benchmarks/{script}", *arguments]
    variables = {**os.environ, "PYTHONPATH": str(checkout)}
    done = subprocess.run(command, cwd=checkout, env=variables, capture_output=True, text=True)
    files = re.findall(r"result: (\S+)", done.stdout)
    if done.returncode or not files:
        raise SystemExit(f"{shlex.join(command)} in {checkout}:\n{done.stdout}{done.stderr}")
    found: dict[str, float] = {}
    for file in files:
        found.update(ratios(json.loads((checkout / file).read_text()), ()))
    return found


def ratios(value: Any, place: tuple[str, ...]) -> Iterator[tuple[str, float]]:
    """What is called a ratio; of a spread, the median."""
    if isinstance(value, list):
        value = {_label(each, index): each for index, each in enumerate(value)}
    if not isinstance(value, dict):
        if "ratio" in place and isinstance(value, int | float):
            yield ", ".join(part for part in place if part not in ("ratio", "median")), value
        return
    if "median" in value:
        value = {"median": value["median"]}
    for key, each in value.items():
        yield from ratios(each, (*place, str(key)))


def _label(row: Any, index: int) -> str:
    """Of a row of a table, by what was varied."""
    varied = ("ranks", "bytes", "width", "schedule")
    named = [f"{key} {row[key]}" for key in varied if isinstance(row, dict) and key in row]
    return ", ".join(named) or str(index)


def compare(benchmark: str, before: Path, after: Path, rounds: int) -> dict[str, Any]:
    sides: dict[str, list[dict[str, float]]] = {"before": [], "after": []}
    for _ in range(rounds):
        sides["before"].append(measured(before, benchmark))
        sides["after"].append(measured(after, benchmark))
    rows = {}
    for place in sides["before"][0]:
        old, new = ([found[place] for found in sides[side]] for side in ("before", "after"))
        change = statistics.median(new) / statistics.median(old)
        change = 1 / change if benchmark.startswith(SPEED_UPS) else change
        rows[place] = {"before": old, "after": new, "change": change}
        print(f"{benchmark.split()[0]:24} {place:48} {change:.3f}", flush=True)
    return {
        "rows": rows,
        "change_median": statistics.median(row["change"] for row in rows.values()),
        "change_worst": max(row["change"] for row in rows.values()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("benchmarks", nargs="+", metavar="BENCHMARK")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--save", default="before_after", metavar="NAME")
    args = parser.parse_args()
    before, after = args.before.resolve(), args.after.resolve()
    found = {}
    for benchmark in args.benchmarks:
        found[benchmark] = compare(benchmark, before, after, args.rounds)
        save(args.save, {"target": TARGET, "rounds": args.rounds, "benchmarks": found})


if __name__ == "__main__":
    main()
