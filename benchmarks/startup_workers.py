"""How long many workers take for two steps: forked from one process, and each importing torch.

The same small job with and without --no-fork, taking turns, from the start of the command to its
end. Nearly all of it is importing torch: forked workers share one import. The time should grow no
worse than linearly: twice as many workers take at most twice as long.

    python benchmarks/startup_workers.py --workers 2 3 4 16 64
    python benchmarks/startup_workers.py --workers 8 16 32 64 --sides forked --repeats 3
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

from common import save, spread

SCRIPT = """
import torch
import farandole as fd

run = fd.init(timeout=900)
model = torch.nn.Linear(8, 1)
model, opt = run.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
for _ in range(2):
    opt.zero_grad()
    model(torch.ones(4, 8)).sum().backward()
    opt.step()
"""
SIDES = {"forked": (), "fresh": ("--no-fork",)}


def seconds_of(script: Path, workers: int, options: tuple[str, ...]) -> float:
    command = [sys.executable, "-m", "farandole", "run", "-n", str(workers), *options, str(script)]
    begin = time.perf_counter()
    subprocess.run(command, check=True, cwd=script.parent, stdout=subprocess.DEVNULL)
    return time.perf_counter() - begin


def growth(seconds: dict[int, dict[str, list[float]]], side: str) -> list[dict[str, float]]:
    """From each number of workers to the next: how many times as many, and as long."""
    medians = {workers: spread(found[side])["median"] for workers, found in seconds.items()}
    counts = sorted(medians)
    return [
        {
            "workers": more,
            "times_workers": more / less,
            "times_seconds": medians[more] / medians[less],
        }
        for less, more in pairwise(counts)
    ]


def _save(seconds: dict[int, dict[str, list[float]]], repeats: int) -> None:
    sides = list(next(iter(seconds.values())))
    save(
        "startup_workers",
        {
            "steps": 2,
            "seconds": {
                str(workers): {side: spread(values) for side, values in found.items()}
                for workers, found in seconds.items()
            },
            "growth": {side: growth(seconds, side) for side in sides},
            "repeats": repeats,
        },
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 3, 4, 16, 64])
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--sides", nargs="+", choices=list(SIDES), default=list(SIDES))
    args = parser.parse_args()
    seconds: dict[int, dict[str, list[float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "two_steps.py"
        script.write_text(SCRIPT)
        for repeat in range(args.repeats):
            for workers in args.workers:  # in turns, so that a busy minute is not one number's
                found = seconds.setdefault(workers, {side: [] for side in args.sides})
                for side in args.sides:
                    found[side].append(seconds_of(script, workers, SIDES[side]))
                told = ", ".join(f"{side} {values[-1]:.1f} s" for side, values in found.items())
                print(f"{workers} workers: {told}", flush=True)
            _save(seconds, repeat + 1)  # so far
    for side in args.sides:
        steps = growth(seconds, side)
        worst = max((step["times_seconds"] / step["times_workers"] for step in steps), default=0.0)
        print(f"{side}: time grows at most {worst:.2f} times as fast as the number of workers")


if __name__ == "__main__":
    main()
