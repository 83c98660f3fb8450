"""Is `Cluster.is_settled` true? A server is killed each time that it says yes.

Three servers with one replica, two workers that push as fast as they can: the i-th push of a worker
adds i to each of its rows, so that after n pushes a row holds n (n + 1) / 2, and a push that was
lost cannot be made up for by one that was counted twice. Whenever `is_settled` says yes a random
server gets SIGKILL, at once, without waiting until the death of the one before was seen. At the end
every row must hold the sum of exactly the pushes that were acknowledged.

    python benchmarks/server_kills.py
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import os
import random
import signal
import time
from typing import Any

import torch
from common import save, spread

from farandole.server import Cluster, connect

TABLE = "sums"
REGION = 32_768  # rows of each worker: 256 KiB of int64


def push(address: str, key_file: str, region: int, acknowledged: Any, stop: Any) -> None:
    """Until told to stop. `acknowledged` counts."""
    torch.set_num_threads(1)
    with connect(address, key_file) as store:
        store.find(TABLE)
        while not stop.is_set():
            values = torch.full((REGION,), acknowledged.value + 1, dtype=torch.int64)
            store.push(TABLE, values, start=region * REGION)
            acknowledged.value += 1


def kill_when_settled(cluster: Cluster, seconds: float) -> list[float]:
    """How long it took until it was settled again, for each kill."""
    waits: list[float] = []
    began = killed = time.monotonic()
    while time.monotonic() < began + seconds:
        cluster.check()
        if cluster.is_settled:
            waits.append(time.monotonic() - killed)
            os.kill(random.choice(cluster.pids), signal.SIGKILL)
            killed = time.monotonic()
    while not cluster.is_settled:
        cluster.check()
    return [*waits[1:], time.monotonic() - killed]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--servers", type=int, default=3)
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--name", default="server_kills")
    args = parser.parse_args()
    random.seed(args.seed)
    context = mp.get_context("spawn")
    with Cluster(servers=args.servers, replicas=args.replicas) as cluster:
        stop = context.Event()
        counts = [context.Value("q", 0) for _ in range(args.workers)]
        where = (cluster.address, str(cluster.key_file))
        with connect(*where) as store:
            store.create(TABLE, args.workers * REGION, dtype="int64", sparse=True)
            workers = [
                context.Process(target=push, args=(*where, region, count, stop))
                for region, count in enumerate(counts)
            ]
            for worker in workers:
                worker.start()
            while not all(count.value for count in counts):
                time.sleep(0.05)
            waits = kill_when_settled(cluster, args.seconds)
            stop.set()
            for worker in workers:
                worker.join(120)
            found = judge(store, [count.value for count in counts])
    found |= {"servers_killed": len(waits), "seconds_until_settled_again": spread(waits)}
    found["exit_codes_of_workers"] = [worker.exitcode for worker in workers]
    save(args.name, {"settings": vars(args), **found})
    print(json.dumps(found, indent=2))


def judge(store: Any, counts: list[int]) -> dict[str, Any]:
    wrong = 0
    for region, count in enumerate(counts):
        rows = store.get(TABLE, start=region * REGION, stop=(region + 1) * REGION)
        wrong += int((rows != count * (count + 1) // 2).sum())
    return {
        "pushes_acknowledged": sum(counts),
        "rows": len(counts) * REGION,
        "rows_with_another_sum": wrong,
    }


if __name__ == "__main__":
    main()
