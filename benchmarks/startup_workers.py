"""How long many workers take for two steps: forked from one process, and each importing torch.

The same small job with and without --no-fork, taking turns, from the start of the command to its
end. Nearly all of it is importing torch: forked workers share one import.

    python benchmarks/startup_workers.py --workers 2 3 4 16 64
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
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


def _save(seconds: dict[int, dict[str, list[float]]], repeats: int) -> None:
    save(
        "startup_workers",
        {
            "steps": 2,
            "seconds": {
                str(workers): {side: spread(values) for side, values in found.items()}
                for workers, found in seconds.items()
            },
            "repeats": repeats,
        },
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 3, 4, 16, 64])
    parser.add_argument("--repeats", type=int, default=1)
    args = parser.parse_args()
    seconds: dict[int, dict[str, list[float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "two_steps.py"
        script.write_text(SCRIPT)
        for workers in args.workers:
            found = seconds[workers] = {side: [] for side in SIDES}
            for _ in range(args.repeats):
                for side, options in SIDES.items():
                    found[side].append(seconds_of(script, workers, options))
            told = ", ".join(f"{side} {min(values):.1f} s" for side, values in found.items())
            print(f"{workers} workers: {told}", flush=True)
            _save(seconds, args.repeats)  # so far


if __name__ == "__main__":
    main()
