"""How fast are pushes and pulls? Against gloo's send and receive of the same bytes, in one run.

A worker pushes a whole table and gets it back (one exchange); beside it the same worker sends as
many bytes through gloo to a process that only sends them back, and which neither adds, nor checks,
nor seals. The two take turns, round by round, and the ratio of each round counts: gloo's time over
ours. With several servers gloo's bytes are divided over as many processes. Two ways: over TCP,
every frame sealed, and through shared memory.

    python benchmarks/server_throughput.py                    all
    python benchmarks/server_throughput.py --workers 1 --servers 1 --sizes 1048576

Targets: 0.9 at 1 MiB and more over TCP, 2 through shared memory.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from common import save

from farandole.server import Cluster, connect

SIZES = (4 << 10, 64 << 10, 1 << 20, 4 << 20, 16 << 20)
TARGETS = {"tcp": 0.9, "shared memory": 2.0}


def join_gloo(rank: int, size: int, port: int) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=size)


def echo(rank: int, args: argparse.Namespace, workers: int, servers: int, port: int) -> None:
    """gloo's side of a server: what comes is sent back."""
    join_gloo(rank, workers + servers, port)
    for nbytes in args.sizes:
        mine = torch.zeros(nbytes // 4 // servers)
        for _ in range(len(TARGETS) * (args.rounds + args.warm)):
            dist.barrier()
            for worker in range(workers):
                dist.recv(mine, worker)
                dist.send(mine, worker)
            dist.barrier()
    dist.destroy_process_group()


def gloo_exchange(mine: torch.Tensor, workers: int, servers: int) -> float:
    """Seconds. All parts are sent before the first is awaited, as our client does."""
    began = time.perf_counter()
    parts = mine.split(mine.numel() // servers)
    sends = [dist.isend(parts[server], workers + server) for server in range(servers)]
    receives = [dist.irecv(parts[server], workers + server) for server in range(servers)]
    for work in [*sends, *receives]:
        work.wait()
    return time.perf_counter() - began


def work(
    rank: int,
    args: argparse.Namespace,
    workers: int,
    servers: int,
    port: int,
    where: tuple[str, str],
    results: Any,
) -> None:
    join_gloo(rank, workers + servers, port)
    stores = {
        "tcp": connect(*where, shared_memory=False),
        "shared memory": connect(*where),
    }
    for nbytes in args.sizes:
        count = nbytes // 4
        name = f"table of {nbytes}"
        mine = torch.zeros(count)
        for way, store in stores.items():
            store.create(name, count)
            outgoing, incoming = (
                store.buffer(count, torch.float32),
                store.buffer(count, torch.float32),
            )
            ours, theirs = [], []
            for _ in range(args.rounds + args.warm):
                dist.barrier()
                theirs.append(gloo_exchange(mine, workers, servers))
                dist.barrier()
                began = time.perf_counter()
                push, get = store.start_exchange(name, outgoing, out=incoming)
                push.wait()
                get.wait()
                ours.append(time.perf_counter() - began)
            results.put((rank, nbytes, way, ours[args.warm :], theirs[args.warm :]))
    for store in stores.values():
        store.close()
    dist.destroy_process_group()


def measure(
    args: argparse.Namespace, workers: int, servers: int, port: int
) -> list[dict[str, Any]]:
    context = mp.get_context("spawn")
    results = context.SimpleQueue()
    with Cluster(servers=servers, replicas=0) as cluster:
        where = (cluster.address, str(cluster.key_file))
        processes = [
            context.Process(target=echo, args=(workers + n, args, workers, servers, port))
            for n in range(servers)
        ]
        processes += [
            context.Process(target=work, args=(n, args, workers, servers, port, where, results))
            for n in range(workers)
        ]
        for process in processes:
            process.start()
        found = [results.get() for _ in range(workers * len(args.sizes) * len(TARGETS))]
        for process in processes:
            process.join(60)
    rows = []
    for nbytes in args.sizes:
        for way, target in TARGETS.items():
            mine = [row for row in found if row[1] == nbytes and row[2] == way]
            # The slowest worker's time is the round's, on both sides.
            ours = [max(values) for values in zip(*(row[3] for row in mine), strict=True)]
            theirs = [max(values) for values in zip(*(row[4] for row in mine), strict=True)]
            ratios = sorted(b / a for a, b in zip(ours, theirs, strict=True))
            row = {
                "workers": workers,
                "servers": servers,
                "bytes": nbytes,
                "way": way,
                "ours_ms": statistics.median(ours) * 1e3,
                "gloo_ms": statistics.median(theirs) * 1e3,
                "ratio": statistics.median(ratios),
                "ratio_quartiles": [ratios[len(ratios) // 4], ratios[3 * len(ratios) // 4]],
                "gigabytes_per_second": 2 * workers * nbytes / statistics.median(ours) / 1e9,
                "target": target if nbytes >= 1 << 20 else None,
            }
            rows.append(row)
            print(
                f"{workers} worker(s), {servers} server(s), {nbytes >> 10:6} KiB, {way:14} "
                f"{row['ours_ms']:8.2f} ms, gloo {row['gloo_ms']:8.2f} ms, "
                f"ratio {row['ratio']:.2f}",
                flush=True,
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--servers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES))
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--warm", type=int, default=5, help="rounds that do not count")
    parser.add_argument("--port", type=int, default=29611)
    parser.add_argument("--name", default="server_throughput")
    args = parser.parse_args()
    rows = []
    for workers in args.workers:
        for servers in args.servers:
            rows += measure(args, workers, servers, args.port)
            args.port += 1
    save(args.name, {"rows": rows})


if __name__ == "__main__":
    main()
