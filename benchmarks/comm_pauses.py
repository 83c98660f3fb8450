"""All-reduce between hosts after a pause, as between the steps of a training, beside gloo.

Two emulated hosts of two ranks, joined by 1 Gbit/s (needs root). The ranks meet, sleep for 0, 0.1
or 1 s, and reduce 1 MiB; both sides take turns. A connection that was idle starts slowly, threads
and caches are cold. Of each turn the slowest rank's time counts, of all turns the median. Target:
not slower than gloo after any pause.

    sudo python benchmarks/comm_pauses.py
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from common import spread
from emulated import Target, add_options, keep, on_hosts

import farandole as fd

PAUSES = {0.0: 30, 0.1: 30, 1.0: 15}  # seconds, and turns


def work(run: fd.Run, args: argparse.Namespace) -> dict[str, Any]:
    tensor = torch.ones(args.bytes // 4)

    def ours() -> None:
        run.group.all_reduce(tensor, "max")

    def gloo() -> None:
        dist.all_reduce(tensor, dist.ReduceOp.MAX)

    sides: dict[str, Callable[[], None]] = {"farandole": ours, "gloo": gloo}
    rows = []
    for pause, turns in PAUSES.items():
        taken: dict[str, list[float]] = {name: [] for name in sides}
        for turn in range(turns * args.times):
            for name in sorted(sides, reverse=bool(turn % 2)):
                run.group.barrier()
                time.sleep(pause)
                begin = time.perf_counter()
                sides[name]()
                taken[name].append(time.perf_counter() - begin)
        everyone = run.group.gather_json(taken)
        slowest = {
            name: [max(times) for times in zip(*(rank[name] for rank in everyone), strict=True)]
            for name in sides
        }
        found = {name: spread(times) for name, times in slowest.items()}
        ratio = found["farandole"]["median"] / found["gloo"]["median"]
        rows.append({"pause_seconds": pause, "seconds": found, "ratio": ratio})
    return {"bytes": args.bytes, "transport": run.group.transport.name, "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bytes", type=int, default=2**20)
    parser.add_argument("--times", type=int, default=1, help="as many turns [1]")
    add_options(parser, rate="1gbit", workers_per_host=2, save_as="comm_pauses")
    args = parser.parse_args()
    result = on_hosts(args, work)
    targets = [
        Target(f"time after {row['pause_seconds']:g} s, to gloo's", row["ratio"], 1.0)
        for row in result["rows"]
    ]
    keep(args, result, targets)


if __name__ == "__main__":
    main()
