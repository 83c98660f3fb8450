"""What lost workers cost: 4 workers, one SIGKILLed every 20 s, ours against torchrun's.

Time is cut into windows of 60 s. In every second one a random worker, rank 0 not excepted, dies at
second 0, 20 and 40; those between are undisturbed. So both kinds see the same machine, whatever
else it does. Ours replaces a lost worker while the others go on; torchrun starts all again, from a
checkpoint that is 5 s old at most. What a side has not caught up with when a window ends, it does
in the next one, which counts in its favour, but only for the last of three kills.

    goodput           steps in windows with kills over those in windows without
    lost seconds      what is missing of the goodput, as time
    recovery seconds  from a kill to the next step that any worker has finished

The global batch is the same whatever the number of workers, so a step is a step. All steps of our
job are then taken again in one process, with exactly the samples that its workers had.

    python benchmarks/elastic.py
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import save, spread
from kills.replay import compare
from kills.strikes import Course, run_struck

# Otherwise torchrun's workers connect to addresses that those before them left in its store, which
# outlives them: with gloo none of its restarts succeeds (PyTorch 2.13).
NEW_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
SCRIPTS = Path(__file__).parent / "kills"


def ours(workers: int, kills: int) -> list[str]:
    words = ["-m", "farandole", "run", "-n", str(workers), "--min", "1"]
    return [sys.executable, *words, "--restarts", str(kills), str(SCRIPTS / "ours.py")]


def torchruns(workers: int, kills: int) -> list[str]:
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(workers)]
    limit = ["--max-restarts", str(kills), "--monitor-interval", "0.1"]
    return [sys.executable, *words, *limit, str(SCRIPTS / "torchruns.py")]


def summary(course: Course, seconds: float) -> dict[str, Any]:
    # The first and the last window are calm, so that a load that grows or shrinks evenly cancels.
    goodput = statistics.mean(course.struck_steps) / statistics.mean(course.calm_steps)
    return {
        "steps_undisturbed": course.calm_steps,
        "steps_with_kills": course.struck_steps,
        "kills": len(course.recoveries),
        "goodput": goodput,
        "lost_seconds": (1 - goodput) * seconds * len(course.struck_steps),
        "recovery_seconds": {**spread(course.recoveries), "longest": max(course.recoveries)},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--windows", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--kills", type=int, default=3, help="in every second window")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--name", default="elastic")
    args = parser.parse_args()
    result: dict[str, Any] = vars(args)
    total = args.windows * args.seconds
    for side, command in (("ours", ours), ("torchrun", torchruns)):
        with tempfile.TemporaryDirectory() as temporary:
            place = Path(temporary) / "job"
            words = [*command(args.workers, args.windows * args.kills), str(place), str(total)]
            course = run_struck(
                words, place, args.windows, args.seconds, kills=args.kills, environment=NEW_STORE
            )
            result[side] = summary(course, args.seconds)
            print(side, course, flush=True)
            if side == "ours":
                result["replay"] = compare(place)
                print(result["replay"], flush=True)
    lost = [max(0.0, result[side]["lost_seconds"]) for side in ("ours", "torchrun")]
    result["lost_time_ratio"] = lost[0] / lost[1] if lost[1] else None
    save(args.name, result)
    for side in ("ours", "torchrun"):
        print(f"goodput of {side}: {result[side]['goodput']:.3f}")
    print(f"lost seconds, ours over torchrun's: {lost[0]:.1f} / {lost[1]:.1f}")


if __name__ == "__main__":
    main()
