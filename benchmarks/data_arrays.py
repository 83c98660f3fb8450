"""Epochs over an HDF5 file of four times the memory that the process may have.

`fd.data.array` is read in random order under a limit of the process's own memory, and its speed is
compared with reading the same file once from begin to end, block by block, in turns with it. The
limit holds for what the process has beyond an interpreter with PyTorch and h5py in it:
`RLIMIT_DATA` is set to what that takes and the limit, so that going beyond it fails; the peak of
the resident set is written down too. Files are not compressed: that would hide the cost of reading.

How random the order is: distances between neighbours, and between where a sample lies and where it
comes, as parts of the file (a third is a uniform permutation's mean), and how many blocks a batch
is drawn from, against a permutation.

    python benchmarks/data_arrays.py
    python benchmarks/data_arrays.py --limit-mib 32 --rounds 1     quick

The file's pages are dropped from the page cache before every pass (`posix_fadvise`).

Target: peak <= limit; >= 0.9 of the speed of sequential reading.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from common import save, spread

MIB = 2**20
ROW = (3, 224, 224)  # bytes, as photographs are kept: 147 KiB
ROW_BYTES = math.prod(ROW)
ROWS_IN_BLOCK = 8  # 1.1 MiB, as the file keeps it
BATCH = 32
OF_LIMIT = 0.5  # for chunks; the rest is for batches and what HDF5 itself keeps


def write(path: Path, size: int) -> None:
    import h5py

    random = np.random.default_rng(0)
    rows = size // ROW_BYTES
    with h5py.File(path, "w") as file:
        stored = file.create_dataset("images", (rows, *ROW), np.uint8, chunks=(ROWS_IN_BLOCK, *ROW))
        for begin in range(0, rows, 256):
            end = min(rows, begin + 256)
            stored[begin:end] = random.integers(0, 256, (end - begin, *ROW), np.uint8)


def drop_page_cache(path: Path) -> None:
    """Of this file: every user may ask for that, once its pages are written."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def resident(which: str) -> int:
    """`VmRSS` or `VmHWM` of this process, in bytes."""
    found = dict(
        line.split(":", 1)
        for line in Path("/proc/self/status").read_text().splitlines()
        if ":" in line
    )
    return int(found[which].split()[0]) * 1024


def sequential(path: Path, chunk_bytes: int) -> dict[str, Any]:
    """As much at a time as the other side, from begin to end, and nothing done with it."""
    import h5py

    began = time.perf_counter()
    total = 0
    with h5py.File(path) as file:
        stored = file["images"]
        rows = max(1, chunk_bytes // (ROWS_IN_BLOCK * ROW_BYTES)) * ROWS_IN_BLOCK
        for begin in range(0, len(stored), rows):
            total += stored[begin : begin + rows].nbytes
    return {"bytes": total, "seconds": time.perf_counter() - began}


def epoch(path: Path, limit: int, chunk_bytes: int, seed: int) -> dict[str, Any]:
    """One epoch in random order, batches of tensors, within the limit."""
    import torch

    import farandole as fd

    torch.set_num_threads(1)
    run = fd.init(seed=seed)
    data = fd.data.array(
        path, "images", chunk_bytes=chunk_bytes, memory_bytes=int(OF_LIMIT * limit)
    )
    loader = run.loader(data, batch_size=BATCH)
    # A first batch of another array: threads, collation and HDF5 are set up.
    small = path.with_name("small.npy")
    np.save(small, np.zeros((BATCH, 4), np.float32))
    list(run.loader(fd.data.array(small), batch_size=BATCH))
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before, used = resident("VmRSS"), _data_bytes()
    resource.setrlimit(resource.RLIMIT_DATA, (used + limit, used + limit))
    began = time.perf_counter()
    total, checksum = 0, 0.0
    for batch in loader:
        total += batch.nbytes
        checksum += float(batch[0, 0, 0, 0])
    seconds = time.perf_counter() - began
    peak = resident("VmHWM") - before
    return {
        "bytes": total,
        "seconds": seconds,
        "peak_bytes": peak,
        "chunks_read": data.chunks_read,
        "chunks": len(data.chunk_sizes),
        "rows_in_chunk": max(data.chunk_sizes),
        "window": data.window,
        "ahead": data.ahead,
        "checksum": checksum,
    }


def _data_bytes() -> int:
    found = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in found.splitlines() if "VmData" in line) * 1024


def order_quality(order: np.ndarray[Any, Any], block: int, batch: int) -> dict[str, float]:
    """Each figure as a part of what a uniform permutation has: 1 is that."""
    count = len(order)
    places = np.arange(count)
    moved = np.abs(order - places).mean() / count
    neighbours = np.abs(np.diff(order)).mean() / count
    permutation = np.random.default_rng(0).permutation(count)
    return {
        "mean_distance_moved": float(moved * 3),
        "mean_distance_of_neighbours": float(neighbours * 3),
        "blocks_in_a_batch": _blocks(order, block, batch) / _blocks(permutation, block, batch),
    }


def _blocks(order: np.ndarray[Any, Any], block: int, batch: int) -> float:
    whole = order[: len(order) // batch * batch].reshape(-1, batch) // block
    return float(np.mean([len(np.unique(each)) for each in whole]))


def measure_order(rows: int, chunk: int, window: int) -> dict[str, float]:
    from farandole.data.chunks.lanes import Readers, lane_order

    lanes = Readers(1, BATCH, 1, False, False).lanes(rows)
    sizes = [min(chunk, rows - begin) for begin in range(0, rows, chunk)]
    return order_quality(lane_order(sizes, lanes, window, 1), chunk, BATCH)


def in_a_process(*arguments: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, __file__, *arguments],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)},
            capture_output=True,
            text=True,
            timeout=1800,
        )
    if done.returncode:
        raise SystemExit(done.stderr)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--limit-mib", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--side", choices=["sequential", "epoch"])
    parser.add_argument("--path", type=Path)
    parser.add_argument("--chunk-kib", type=int, default=4096)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    limit = args.limit_mib * MIB
    if args.side == "sequential":
        print(json.dumps(sequential(args.path, args.chunk_kib * 1024)))
        return
    if args.side == "epoch":
        print(json.dumps(epoch(args.path, limit, args.chunk_kib * 1024, args.seed)))
        return
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        path = Path(folder, "images.h5")
        write(path, 4 * limit)
        found: dict[str, list[dict[str, Any]]] = {"sequential": [], "epoch": []}
        for number in range(args.rounds):
            for side in ("sequential", "epoch") if number % 2 else ("epoch", "sequential"):
                drop_page_cache(path)
                options = ["--side", side, "--path", str(path), "--seed", str(number)]
                options += ["--limit-mib", str(args.limit_mib), "--chunk-kib", str(args.chunk_kib)]
                found[side].append(in_a_process(*options))
    report(limit, found)


def report(limit: int, found: dict[str, list[dict[str, Any]]]) -> None:
    rate = {
        side: spread([each["bytes"] / each["seconds"] / MIB for each in passes])
        for side, passes in found.items()
    }
    peak = max(each["peak_bytes"] for each in found["epoch"])
    window = found["epoch"][0]["window"]
    rows = 4 * limit // ROW_BYTES
    ratio = rate["epoch"]["median"] / rate["sequential"]["median"]
    result = {
        "file_bytes": 4 * limit,
        "limit_bytes": limit,
        "peak_bytes": peak,
        "page_cache": "dropped before every pass",
        "mib_per_second": rate,
        "order": measure_order(rows, found["epoch"][0]["rows_in_chunk"], window),
        "passes": found,
        "ratio": ratio,
    }
    save("data_arrays", result)
    for side, each in rate.items():
        print(f"{side:12} {each['median']:8.0f} MiB/s")
    print(f"order, as parts of a permutation's: {result['order']}")
    print(f"peak {peak / MIB:.0f} MiB of {limit / MIB:.0f} MiB")
    print(f"random order in bounded memory: {ratio:.2f} of sequential reading")


if __name__ == "__main__":
    main()
