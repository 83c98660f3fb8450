"""How long it takes to prove and to build the schedules, and for a rank to find its own part.

Targets: all algorithms checked at p = 64 in at most 10 s, all built for p = 2,048 in at most 5 s.
Ranks sit eight to a host.

    python benchmarks/schedule_build.py
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

from common import save, spread

from farandole.schedule import ALGORITHMS, build, check
from farandole.topology import Topology

CHECKED_RANKS = 64
BUILT_RANKS = 2048
RANKS_PER_HOST = 8


def hosts(ranks: int) -> Topology:
    return Topology.from_names([f"host{rank // RANKS_PER_HOST}" for rank in range(ranks)])


def timed(work: Callable[..., object], *arguments: object) -> float:
    begin = time.perf_counter()
    work(*arguments)
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    few, many = hosts(CHECKED_RANKS), hosts(BUILT_RANKS)
    # By name: one figure a repeat.
    checks: dict[str, list[float]] = {name: [] for name in ALGORITHMS}
    builds: dict[str, list[float]] = {name: [] for name in ALGORITHMS}
    views: dict[str, list[float]] = {name: [] for name in ALGORITHMS}
    for _ in range(args.repeats):
        for name in ALGORITHMS:
            schedule = build(name, CHECKED_RANKS, few)
            checks[name].append(timed(check, schedule))
            builds[name].append(timed(build, name, BUILT_RANKS, many))
            schedule = build(name, BUILT_RANKS, many)
            views[name].append(timed(schedule.for_rank, BUILT_RANKS // 2))
    totals = {
        title: spread([sum(repeat) for repeat in zip(*seconds.values(), strict=True)])
        for title, seconds in (("check", checks), ("build", builds), ("view_of_a_rank", views))
    }
    save(
        "schedule_build",
        {
            "checked_ranks": CHECKED_RANKS,
            "built_ranks": BUILT_RANKS,
            "target_check_seconds": 10.0,
            "target_build_seconds": 5.0,
            "seconds_for_all_algorithms": totals,
            "check_seconds": {name: spread(seconds) for name, seconds in checks.items()},
            "build_seconds": {name: spread(seconds) for name, seconds in builds.items()},
            "view_of_a_rank_seconds": {name: spread(seconds) for name, seconds in views.items()},
            "repeats": args.repeats,
        },
    )
    print(f"checking all at p = {CHECKED_RANKS}: {totals['check']['median']:.2f} s (target 10 s)")
    print(f"building all for p = {BUILT_RANKS}: {totals['build']['median']:.2f} s (target 5 s)")


if __name__ == "__main__":
    main()
