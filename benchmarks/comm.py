"""All-reduce against gloo and Open MPI, in the same processes, taking turns.

`farandole bench comm` measures; this keeps its rows and holds them against the targets. On one
host, with 2 and with 4 ranks: at least 5 times as fast as gloo up to 1 MiB, 3 times from 4 MiB on,
and not slower than Open MPI from 1 MiB on. With --emulated, two hosts of two ranks joined by
1 Gbit/s (needs root): 1.4 times as fast as gloo for 64 MiB, and 0.9 of what the line can carry.

    python benchmarks/comm.py
    sudo python benchmarks/comm.py --emulated
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import save

MIB = 2**20
PYTHON = [sys.executable, "-m"]
LINE_BYTES_PER_SECOND = 1e9 / 8


def bench(command: list[str]) -> dict[str, Any]:
    """Runs the command, which ends in `bench comm …`, and returns what it wrote."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.json"
        subprocess.run([*command, "--json", str(file)], check=True)
        found = json.loads(file.read_text())
    del found["command"]  # it names a file that is gone; `save` adds the command of this script
    return found


def smallest(
    rows: list[dict[str, Any]], name: str, low: float = 0, high: float = math.inf
) -> float:
    ratios = [row["ratio"][name] for row in rows if low <= row["bytes"] <= high]
    return min(ratios, default=math.nan)


def one_host(ranks: int, sizes: str, repeats: int) -> dict[str, float]:
    options = ["--sizes", sizes, "--repeats", str(repeats), "--against", "gloo,mpi"]
    found = bench([*PYTHON, "farandole", "bench", "comm", "-n", str(ranks), *options])
    ratios = {
        "to gloo up to 1 MiB (target 5)": smallest(found["rows"], "gloo", high=MIB),
        "to gloo from 4 MiB (target 3)": smallest(found["rows"], "gloo", low=4 * MIB),
        "to Open MPI from 1 MiB (target 1)": smallest(found["rows"], "mpi", low=MIB),
    }
    save(f"comm-{ranks}-ranks", {**found, "smallest_ratio": ratios})
    return ratios


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
    parser.add_argument("--emulated", action="store_true", help="two hosts instead; needs root")
    args = parser.parse_args()
    if args.emulated:
        results = {"2 × 2 ranks": two_hosts(args.repeats)}
    else:
        results = {
            f"{ranks} ranks": one_host(ranks, args.sizes, args.repeats) for ranks in args.ranks
        }
    for where, ratios in results.items():
        for what, ratio in ratios.items():
            print(f"ratio {where} {what}: {ratio:.2f}")


if __name__ == "__main__":
    main()
