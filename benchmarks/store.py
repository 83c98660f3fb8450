"""The rendezvous store against PyTorch's TCPStore: operations a second, and joining a job.

Each store is served by a process of its own, as by a launcher, and used in turns. Joining is what
`fd.init` does once torch is imported: find the store, wait for all ranks, connect them by gloo and
by shared memory; the ranks are forked, and the last one counts. Targets: at least half of
TCPStore's operations a second, and joining in at most 1.1 times its time.

    python benchmarks/store.py
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch
from common import save, spread
from torch.distributed import PrefixStore, Store, TCPStore

from farandole.worker.environment import RankAssignment
from farandole.worker.join import join
from farandole.worker.loopback import serve_tcp_store
from farandole.worker.rendezvous import find_store
from farandole.worker.store.address import LOOPBACK, StoreAddress
from farandole.worker.store.job_store import JobStore

PATIENCE = timedelta(seconds=120)
SIDES = ("ours", "TCPStore")


def in_child(work: Callable[[int], None]) -> tuple[int, int]:
    """Runs `work` in a process of its own. Its number, and the end of a pipe that `work` has."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(reading)
        try:
            work(writing)
        finally:
            os._exit(0)
    os.close(writing)
    return child, reading


def served(side: str, folder: Path) -> tuple[int, RankAssignment]:
    """A process that serves a store, and what a rank of its job is told."""

    def serve(pipe: int) -> None:
        store = JobStore(folder) if side == "ours" else serve_tcp_store(PATIENCE, LOOPBACK, 0)
        os.write(pipe, str(store.port).encode())
        time.sleep(600)

    child, pipe = in_child(serve)
    assignment = RankAssignment(
        "farandole", address=LOOPBACK, port=int(os.read(pipe, 10)), agent_store=True
    )
    if side == "ours":
        assignment = replace(assignment, store=StoreAddress(folder / "store.socket"))
    os.close(pipe)
    return child, assignment


def end(child: int) -> None:
    os.kill(child, 9)
    os.waitpid(child, 0)


def operations(store: Store) -> dict[str, Callable[[], object]]:
    store.set("key", "value")
    return {
        "set and get": lambda: (store.set("key", "value"), store.get("key")),
        "get": lambda: store.get("key"),
        "add": lambda: store.add("count", 1),
        "check": lambda: store.check(["key"]),
        "wait": lambda: store.wait(["key"], PATIENCE),
    }


def per_second(work: Callable[[], object], count: int) -> float:
    begin = time.perf_counter()
    for _ in range(count):
        work()
    return count / (time.perf_counter() - begin)


def seconds_to_join(side: str, ranks: int) -> float:
    """From when all are told to begin until the last has joined."""
    with tempfile.TemporaryDirectory() as folder:
        server, assignment = served(side, Path(folder))
        hold, begin = os.pipe()
        children = []
        for rank in range(ranks):
            own = replace(assignment, rank=rank, local_rank=rank, size=ranks, local_size=ranks)

            def be_rank(pipe: int, own: RankAssignment = own) -> None:
                torch.set_num_threads(1)
                os.write(pipe, b"r")
                os.read(hold, 1)
                join(own, torch.device("cpu"), shared_gpu=False, timeout=PATIENCE)
                os.write(pipe, b"j")
                os.read(hold, 1)

            children.append(in_child(be_rank))
        for _, pipe in children:
            os.read(pipe, 1)
        start = time.perf_counter()
        os.write(begin, b"g" * ranks)
        joined = [os.read(pipe, 1) for _, pipe in children]
        seconds = time.perf_counter() - start
        assert joined == [b"j"] * ranks, "a rank failed: see above"
        for child, pipe in children:
            os.close(pipe)
            end(child)
        os.close(hold)
        os.close(begin)
        end(server)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--operations", type=int, default=2000)
    parser.add_argument("--workers", type=int, nargs="*", default=[2, 16])
    args = parser.parse_args()
    joins: dict[int, dict[str, list[float]]] = {
        ranks: {side: [] for side in SIDES} for ranks in args.workers
    }
    for ranks in args.workers:
        for _ in range(args.repeats):
            for side in SIDES:
                joins[ranks][side].append(seconds_to_join(side, ranks))
    rates: dict[str, dict[str, list[float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        servers = {side: served(side, Path(folder)) for side in SIDES}
        stores = {
            side: find_store(assignment, PATIENCE) for side, (_, assignment) in servers.items()
        }
        assert isinstance(stores["TCPStore"], TCPStore)
        works = {side: operations(PrefixStore("p", store)) for side, store in stores.items()}
        for _ in range(args.repeats):
            for side in SIDES:
                for name, work in works[side].items():
                    rates.setdefault(name, {}).setdefault(side, []).append(
                        per_second(work, args.operations)
                    )
        for child, _ in servers.values():
            end(child)
    ratios = {
        name: spread([a / b for a, b in zip(*(found[side] for side in SIDES), strict=True)])
        for name, found in rates.items()
    }
    join_ratios = {
        ranks: spread([a / b for a, b in zip(*(found[side] for side in SIDES), strict=True)])
        for ranks, found in joins.items()
    }
    save(
        "store",
        {
            "operations_per_second": {
                name: {side: spread(values) for side, values in found.items()}
                for name, found in rates.items()
            },
            "operations_ratio": ratios,
            "target_operations_ratio": 0.5,
            "join_seconds": {
                ranks: {side: spread(values) for side, values in found.items()}
                for ranks, found in joins.items()
            },
            "join_ratio": join_ratios,
            "target_join_ratio": 1.1,
            "repeats": args.repeats,
        },
    )
    for name, found in rates.items():
        medians = [spread(found[side])["median"] for side in SIDES]
        print(f"{name}: {medians[0]:,.0f} a second; TCPStore {medians[1]:,.0f}")
    for ranks, found in joins.items():
        medians = [spread(found[side])["median"] for side in SIDES]
        print(f"joining, {ranks} workers: {medians[0]:.3f} s; TCPStore {medians[1]:.3f} s")
    print("ratio", {ranks: round(found["median"], 3) for ranks, found in join_ratios.items()})


if __name__ == "__main__":
    main()
