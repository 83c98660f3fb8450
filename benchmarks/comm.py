"""All-reduce against gloo and Open MPI, in the same processes, taking turns.

`farandole bench comm` measures; this keeps its rows and holds them against the targets. On one
host, with 2 and with 4 ranks: at least 5 times as fast as gloo up to 1 MiB, 3 times from 4 MiB on,
and not slower than Open MPI from 1 MiB on. With --emulated, two hosts of two ranks joined by
1 Gbit/s (needs root): 1.4 times as fast as gloo for 64 MiB, and 0.9 of what the line can carry.
With --everywhere, the whole table for another machine: 4 ranks on 2 of its cores, 4 and 8 on all of
them, and both again over c10d alone, where `auto` should not be slower than gloo.

    python benchmarks/comm.py
    python benchmarks/comm.py --everywhere
    sudo python benchmarks/comm.py --emulated
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common import save

MIB = 2**20
PYTHON = [sys.executable, "-m"]
TRANSPORT = "FARANDOLE_TRANSPORT"
LINE_BYTES_PER_SECOND = 1e9 / 8


def bench(command: list[str], environ: Mapping[str, str] = {}) -> dict[str, Any]:
    """Runs the command, which ends in `bench comm …`, and returns what it wrote."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.json"
        subprocess.run([*command, "--json", str(file)], check=True, env={**os.environ, **environ})
        found = json.loads(file.read_text())
    del found["command"]  # it names a file that is gone; `save` adds the command of this script
    return found


def smallest(
    rows: list[dict[str, Any]], name: str, low: float = 0, high: float = math.inf
) -> float:
    ratios = [row["ratio"][name] for row in rows if low <= row["bytes"] <= high]
    return min(ratios, default=math.nan)


def alternatives() -> str:
    """MPI too, where there is one to start the ranks by."""
    found = shutil.which("mpirun") and importlib.util.find_spec("mpi4py")
    return "gloo,mpi" if found else "gloo"


def one_host(ranks: int, sizes: str, repeats: int, suffix: str = "") -> dict[str, float]:
    options = ["--sizes", sizes, "--repeats", str(repeats), "--against", alternatives()]
    found = bench([*PYTHON, "farandole", "bench", "comm", "-n", str(ranks), *options])
    ratios = {
        "to gloo up to 1 MiB (target 5)": smallest(found["rows"], "gloo", high=MIB),
        "to gloo from 4 MiB (target 3)": smallest(found["rows"], "gloo", low=4 * MIB),
    }
    if "mpi" in found["rows"][0]["ratio"]:
        ratios["to Open MPI from 1 MiB (target 1)"] = smallest(found["rows"], "mpi", low=MIB)
    save(f"comm-{ranks}-ranks{suffix}", {**found, "smallest_ratio": ratios})
    return ratios


def over_c10d(ranks: int, sizes: str, repeats: int, suffix: str) -> dict[str, float]:
    """What `auto` does with CPU tensors where shared memory is not to be used."""
    options = ["--sizes", sizes, "--repeats", str(repeats), "--against", "gloo"]
    command = [*PYTHON, "farandole", "bench", "comm", "-n", str(ranks), *options]
    found = bench(command, {TRANSPORT: "c10d"})
    ratios = {"to gloo, by c10d": smallest(found["rows"], "gloo")}
    save(f"comm-{ranks}-ranks{suffix}-c10d", {**found, "smallest_ratio": ratios})
    return ratios


def everywhere(sizes: str, repeats: int) -> dict[str, dict[str, float]]:
    results: dict[str, dict[str, float]] = {}
    whole = os.sched_getaffinity(0)
    for cores, most_ranks in ((set(sorted(whole)[:2]), (4,)), (whole, (4, 8))):
        suffix = f"-{len(cores)}-cores-{platform.machine()}"
        os.sched_setaffinity(0, cores)  # of this process, and of those it starts
        for ranks in most_ranks:
            where = f"{ranks} ranks on {len(cores)} cores"
            results[where] = one_host(ranks, sizes, repeats, suffix)
            results[f"{where}, c10d"] = over_c10d(ranks, sizes, repeats, suffix)
    return results


def two_hosts(repeats: int) -> dict[str, float]:
    torchrun = "torch.distributed.run --nnodes {hosts} --node-rank {host} --nproc-per-node 2"
    found = bench(
        [
            *PYTHON, "farandole", "emulate", "--hosts", "2", "--rate", "1gbit", "--",
            *PYTHON, *torchrun.split(), "--master-addr", "{master}", "--master-port", "29500",
            "-m", "farandole", "bench", "comm", "--here", "--sizes", "64MiB",
            "--repeats", str(repeats),
        ]
    )  # fmt: skip
    (row,) = found["rows"]
    # A host sends the whole vector once: half of it to be summed by the other, half of it summed.
    bound_seconds = row["bytes"] / LINE_BYTES_PER_SECOND
    ratios = {
        "to gloo (target 1.4)": row["ratio"]["gloo"],
        "to the line (target 0.9)": bound_seconds / row["seconds"],
    }
    record = {**found, "bound_seconds": bound_seconds, "ratio": ratios}
    save("comm-2x2-emulated", record)
    return ratios


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--sizes", default="4KiB:64MiB")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--everywhere", action="store_true", help="the table for another machine")
    parser.add_argument("--emulated", action="store_true", help="two hosts instead; needs root")
    args = parser.parse_args()
    if args.emulated:
        results = {"2 × 2 ranks": two_hosts(args.repeats)}
    elif args.everywhere:
        results = everywhere(args.sizes, args.repeats)
    else:
        results = {
            f"{ranks} ranks": one_host(ranks, args.sizes, args.repeats) for ranks in args.ranks
        }
    for where, ratios in results.items():
        for what, ratio in ratios.items():
            print(f"ratio {where} {what}: {ratio:.2f}")


if __name__ == "__main__":
    main()
