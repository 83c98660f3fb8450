"""What lost workers cost: 4 workers, one SIGKILLed every 20 s, ours against torchrun's.

Four jobs one after the other, each for the same time from its first step on: both launchers
undisturbed, and with kills of random workers, rank 0 not excepted. Ours replaces a lost worker
while the others go on; torchrun starts all again, from a checkpoint that is 5 s old at most.

    goodput           steps of the job with kills over those of the one without
    lost seconds      what is missing of the goodput, as time
    recovery seconds  from a kill to the next step that any worker has finished

The global batch is the same whatever the number of workers, so a step is a step. All steps of our
job with kills are then taken again in one process, with exactly the samples that its workers had.

    python benchmarks/elastic.py
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import save, spread
from kills.replay import compare
from kills.strikes import Course, run_struck

SCRIPTS = Path(__file__).parent / "kills"


def ours(workers: int, kills: int) -> list[str]:
    words = ["-m", "farandole", "run", "-n", str(workers), "--min", "1"]
    return [sys.executable, *words, "--restarts", str(2 * kills), str(SCRIPTS / "ours.py")]


def torchruns(workers: int, kills: int) -> list[str]:
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(workers)]
    limit = ["--max-restarts", str(2 * kills), "--monitor-interval", "0.1"]
    return [sys.executable, *words, *limit, str(SCRIPTS / "torchruns.py")]


def summary(calm: Course, struck: Course, seconds: float) -> dict[str, Any]:
    goodput = struck.steps / calm.steps
    return {
        "steps_undisturbed": calm.steps,
        "steps_with_kills": struck.steps,
        "kills": len(struck.recoveries),
        "goodput": goodput,
        "lost_seconds": (1 - goodput) * seconds,
        "recovery_seconds": {**spread(struck.recoveries), "longest": max(struck.recoveries)},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=180.0)
    parser.add_argument("--every", type=float, default=20.0)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--name", default="elastic")
    args = parser.parse_args()
    count = int(args.seconds / args.every)
    result: dict[str, Any] = {"workers": args.workers, "seconds": args.seconds, "every": args.every}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for side, command in (("ours", ours), ("torchrun", torchruns)):
            courses = []
            for every in (None, args.every):
                place = folder / f"{side}-{'calm' if every is None else 'struck'}"
                words = [*command(args.workers, count), str(place), str(args.seconds)]
                courses.append(run_struck(words, place, args.seconds, every, args.seed))
                print(
                    side, "undisturbed" if every is None else "with kills", courses[-1], flush=True
                )
            result[side] = summary(*courses, args.seconds)
        result["replay"] = compare(folder / "ours-struck")
    result["lost_time_ratio"] = result["ours"]["lost_seconds"] / result["torchrun"]["lost_seconds"]
    save(args.name, result)
    print(result["replay"])
    print(
        f"goodput {result['ours']['goodput']:.3f}, torchrun's {result['torchrun']['goodput']:.3f}"
    )
    print(f"lost time, ours over torchrun's: {result['lost_time_ratio']:.2f}")


if __name__ == "__main__":
    main()
