"""Is anything lost, and how long does it stall? Servers and workers are killed under full load.

Three servers with one replica, four workers that push 1 MiB of ones as fast as they can, each into
rows of its own. Every few seconds a process is killed with SIGKILL, a server and a worker in turns;
another one takes its place. In the end every row must hold exactly as many ones as pushes of them
were acknowledged; one more where the worker was killed between sending and hearing of it. A stall
is the longest time that a worker waited for an acknowledgement while, or after, somebody was
killed, beyond the usual.

    python benchmarks/failover.py
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import os
import random
import signal
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from common import save

from farandole.server import Cluster, connect

TABLE = "counts"
REGION = 131_072  # rows of each worker: 1 MiB of int64
WORKERS = 4


def push(address: str, key_file: str, region: int, out: Path, stop: Any) -> None:
    """Until told to stop, or killed. What is known at the end is in a file, written as it goes."""
    torch.set_num_threads(1)
    acknowledged, gaps = 0, []
    with connect(address, key_file) as store, out.open("w", buffering=1) as log:
        store.find(TABLE)
        ones = store.buffer(REGION, torch.int64).fill_(1)
        last = time.monotonic()
        while not stop.is_set():
            store.push(TABLE, ones, start=region * REGION)
            acknowledged += 1
            now = time.monotonic()
            gaps.append(now - last)
            log.write(json.dumps([now, now - last, acknowledged]) + "\n")
            last = now


def read_log(path: Path) -> list[list[float]]:
    """A last line may be half written: its writer was killed, perhaps before it wrote anything."""
    lines: list[list[float]] = []
    if not path.exists():
        return lines
    for line in path.read_text().splitlines():
        try:
            lines.append(json.loads(line))
        except ValueError:
            break
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--every", type=float, default=4.0, help="seconds between kills")
    parser.add_argument("--servers", type=int, default=3)
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--name", default="failover")
    args = parser.parse_args()
    random.seed(args.seed)
    context = mp.get_context("spawn")
    regions = WORKERS + int(args.seconds / args.every) + 2
    with (
        tempfile.TemporaryDirectory() as folder,
        Cluster(servers=args.servers, replicas=args.replicas) as cluster,
    ):
        stop = context.Event()
        with connect(cluster.address, cluster.key_file) as store:
            store.create(TABLE, regions * REGION, dtype="int64")
            workers: dict[int, Any] = {}
            logs: dict[int, Path] = {}

            def start() -> None:
                region = len(logs)
                logs[region] = Path(folder, f"{region}.log")
                where = (cluster.address, str(cluster.key_file), region, logs[region], stop)
                workers[region] = context.Process(target=push, args=where)
                workers[region].start()

            for _ in range(WORKERS):
                start()
            while not all(path.exists() and path.stat().st_size for path in logs.values()):
                time.sleep(0.05)
            kills, killed_workers = kill_in_turns(args, cluster, workers, start)
            stop.set()
            for process in workers.values():
                process.join(120)
            found = judge(store, logs, killed_workers, kills)
    save(args.name, {"settings": vars(args), **found})
    print(json.dumps({key: value for key, value in found.items() if key != "kills"}, indent=2))


def kill_in_turns(
    args: argparse.Namespace, cluster: Cluster, workers: dict[int, Any], start: Any
) -> tuple[list[dict[str, Any]], set[int]]:
    kills: list[dict[str, Any]] = []
    killed: set[int] = set()
    end = time.monotonic() + args.seconds
    due = time.monotonic() + args.every
    while time.monotonic() < end:
        cluster.check()
        time.sleep(0.02)
        if time.monotonic() < due:
            continue
        if len(kills) % 2 == 0:
            if not cluster.is_settled:
                continue  # one more death now could take the last copy of something
            os.kill(random.choice(cluster.pids), signal.SIGKILL)
            kills.append({"what": "server", "when": time.monotonic()})
        else:
            region = random.choice([r for r, process in workers.items() if process.is_alive()])
            os.kill(workers[region].pid, signal.SIGKILL)
            killed.add(region)
            kills.append({"what": "worker", "when": time.monotonic()})
            start()
        due = time.monotonic() + args.every
    while not cluster.is_settled:
        cluster.check()
        time.sleep(0.02)
    return kills, killed


def judge(
    store: Any, logs: dict[int, Path], killed: set[int], kills: list[dict[str, Any]]
) -> dict[str, Any]:
    histories = {region: read_log(path) for region, path in logs.items()}
    lost = extra = in_flight = total = 0
    for region, history in histories.items():
        acknowledged = int(history[-1][2]) if history else 0
        total += acknowledged
        rows = store.get(TABLE, start=region * REGION, stop=(region + 1) * REGION)
        low, high = int(rows.min()), int(rows.max())
        lost += max(0, acknowledged - low)
        # The last acknowledgement of one who was killed may be missing from its log too.
        allowed = 2 if region in killed else 0
        extra += max(0, high - acknowledged - allowed)
        in_flight += region in killed and high > acknowledged
    usual = statistics.median(gap for history in histories.values() for _, gap, _ in history)
    for kill in kills:
        window = (kill["when"], kill["when"] + 3.5)
        waits = [
            gap
            for history in histories.values()
            for when, gap, _ in history
            if window[0] <= when <= window[1] + gap
        ]
        kill["stall_seconds"] = max(waits, default=0.0) - usual
    stalls = {
        what: [kill["stall_seconds"] for kill in kills if kill["what"] == what]
        for what in ("server", "worker")
    }
    return {
        "pushes_acknowledged": total,
        "pushes_lost": lost,
        "pushes_counted_twice": extra,
        "workers_killed_with_a_push_under_way": in_flight,
        "usual_push_seconds": usual,
        "stall_seconds_median": {
            what: statistics.median(found) if found else None for what, found in stalls.items()
        },
        "stall_seconds_longest": {what: max(found, default=0.0) for what, found in stalls.items()},
        "kills": kills,
    }


if __name__ == "__main__":
    main()
