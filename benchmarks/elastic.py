"""What lost workers cost: 4 workers, one SIGKILLed every 20 s, ours against torchrun's.

Jobs one after the other, each for the same time from its first step on: both launchers
undisturbed, and with kills of random workers, rank 0 not excepted; all of that in several rounds,
since the machine may have other work too. Ours replaces a lost worker while the others go on;
torchrun starts all again, from a checkpoint that is 5 s old at most.

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


def summary(calm: list[Course], struck: list[Course], seconds: float) -> dict[str, Any]:
    steps = [sum(course.steps for course in side) for side in (calm, struck)]
    recoveries = [each for course in struck for each in course.recoveries]
    goodput = steps[1] / steps[0]
    return {
        "steps_undisturbed": [course.steps for course in calm],
        "steps_with_kills": [course.steps for course in struck],
        "kills": len(recoveries),
        "goodput": goodput,
        "lost_seconds": (1 - goodput) * seconds * len(struck),
        "recovery_seconds": {**spread(recoveries), "longest": max(recoveries)},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=90.0)
    parser.add_argument("--every", type=float, default=20.0)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--name", default="elastic")
    args = parser.parse_args()
    count = int(args.seconds / args.every)
    courses: dict[str, tuple[list[Course], list[Course]]] = {"ours": ([], []), "torchrun": ([], [])}
    replays = []
    for number in range(args.rounds):
        for side, command in (("ours", ours), ("torchrun", torchruns)):
            for is_struck in (False, True):
                with tempfile.TemporaryDirectory() as temporary:
                    place = Path(temporary) / "job"
                    words = [*command(args.workers, count), str(place), str(args.seconds)]
                    every = args.every if is_struck else None
                    course = run_struck(words, place, args.seconds, every, number)
                    courses[side][is_struck].append(course)
                    print(side, "with kills" if is_struck else "undisturbed", course, flush=True)
                    if is_struck and side == "ours":
                        replays.append(compare(place))
                        print(replays[-1], flush=True)
    result: dict[str, Any] = {
        "workers": args.workers,
        "rounds": args.rounds,
        "seconds": args.seconds,
        "every": args.every,
        **{side: summary(*both, args.seconds) for side, both in courses.items()},
        "replays": replays,
    }
    # What others do on the machine meanwhile may be more than what the kills cost us.
    lost = [max(0.0, result[side]["lost_seconds"]) for side in ("ours", "torchrun")]
    result["lost_time_ratio"] = lost[0] / lost[1] if lost[1] else None
    save(args.name, result)
    for side in ("ours", "torchrun"):
        print(f"goodput of {side}: {result[side]['goodput']:.3f}")
    print(f"lost seconds, ours over torchrun's: {lost[0]:.1f} / {lost[1]:.1f}")


if __name__ == "__main__":
    main()
