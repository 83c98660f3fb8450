"""What `--min` costs while no worker is lost: the same job with and without it, alternately.

Each step keeps a copy of the gradients and ends with one more small collective. The figure is the
time of a step, over the time of a step of the job without `--min`; one worker per core.

    python benchmarks/elastic_cost.py
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

from common import save, spread
from kills.strikes import run_struck

SCRIPT = Path(__file__).parent / "kills" / "ours.py"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--name", default="elastic_cost")
    args = parser.parse_args()
    words = [sys.executable, "-m", "farandole", "run", "-n", str(args.workers)]
    ratios, steps = [], []
    for number in range(args.rounds):
        found = {}
        # In turns, so that neither is always the first.
        for minimum in (["--min", "1"], [])[:: 1 if number % 2 else -1]:
            with tempfile.TemporaryDirectory() as temporary:
                folder = Path(temporary) / "job"
                command = [*words, *minimum, str(SCRIPT), str(folder), str(args.seconds)]
                course = run_struck(command, folder, 1, args.seconds, kills=0)
                found[bool(minimum)] = sum(course.calm_steps)
        ratios.append(found[False] / found[True])
        steps.append({"with": found[True], "without": found[False]})
        print(steps[-1], f"{ratios[-1]:.3f}", flush=True)
    result = {"workers": args.workers, "seconds": args.seconds, "steps": steps}
    save(args.name, {**result, "time_of_a_step_ratio": spread(ratios)})
    print(f"time of a step, with --min over without: {spread(ratios)['median']:.3f}")


if __name__ == "__main__":
    main()
