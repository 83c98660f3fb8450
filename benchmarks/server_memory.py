"""How much memory do parameter servers take? For 1 GiB of parameters, against k + 1 copies of it.

    python benchmarks/server_memory.py

Servers hold every range k + 1 times between them. What they take beyond that and beyond an empty
server is the overhead: after the parameters were put, and after they were pushed to and read.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import psutil
import torch
from common import save

from farandole.server import Cluster, Store, connect

PIECE = 8 << 20  # elements that are sent at a time


def resident(cluster: Cluster) -> int:
    """What is the servers' own: the worker's shared buffers, which they map too, are not."""
    return sum(psutil.Process(pid).memory_full_info().uss for pid in cluster.pids)


def quiet(cluster: Cluster) -> int:
    """Bytes, once they change by less than 1 MiB in a second."""
    before = -(1 << 20)
    while abs((now := resident(cluster)) - before) >= 1 << 20:
        before = now
        time.sleep(1.0)
    return now


def each_piece(store: Store, count: int, do: Any) -> None:
    for start in range(0, count, PIECE):
        do(start, min(PIECE, count - start))


def measure(servers: int, replicas: int, count: int, rule: str) -> dict[str, Any]:
    with (
        Cluster(servers=servers, replicas=replicas) as cluster,
        connect(cluster.address, cluster.key_file) as store,
    ):
        empty = quiet(cluster)
        store.create("parameters", count, rule=rule)
        values = store.buffer(PIECE, torch.float32).normal_()
        out = store.buffer(PIECE, torch.float32)
        each_piece(store, count, lambda start, n: store.put("parameters", values[:n], start=start))
        after_put = quiet(cluster)
        for _ in range(2):
            each_piece(
                store,
                count,
                lambda start, n: store.push("parameters", values[:n], start=start, rate=0.1),
            )
            each_piece(
                store,
                count,
                lambda start, n: store.start_get(
                    "parameters", start=start, stop=start + n, out=out[:n]
                ).wait(),
            )
        after_use = quiet(cluster)
    copies = (replicas + 1) * count * 4
    states = 2 if rule.startswith("adam") else 0
    wanted = copies * (1 + states)
    row = {
        "servers": servers,
        "replicas": replicas,
        "rule": rule,
        "parameter_bytes": count * 4,
        "expected_bytes": wanted,
        "empty_servers_bytes": empty,
        "after_put_over_expected": (after_put - empty) / wanted,
        "after_use_over_expected": (after_use - empty) / wanted,
    }
    print(
        f"{servers} servers, {replicas} replicas, {rule}: {row['after_put_over_expected']:.3f} "
        f"of {wanted / 2**30:.1f} GiB after a put, {row['after_use_over_expected']:.3f} in use; "
        f"an empty server takes {empty / servers / 2**20:.0f} MiB",
        flush=True,
    )
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gib", type=float, default=1.0)
    args = parser.parse_args()
    count = int(args.gib * 2**30 / 4)
    rows = [
        measure(servers, replicas, count, rule)
        for servers, replicas, rule in ((2, 0, "add"), (2, 1, "add"), (3, 2, "add"), (2, 1, "adam"))
    ]
    save("server_memory", {"rows": rows})


if __name__ == "__main__":
    main()
