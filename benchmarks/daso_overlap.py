"""DASO on GPUs: how much of the exchange between hosts goes on while the GPU computes.

Two workers, each said to be a host. PyTorch's profiler sees every kernel of rank 0, and its stream.
What counts is the time of NCCL's kernels during which another kernel of the same rank runs. The
first steps of the trace are kept beside the result, for chrome://tracing.

    python benchmarks/daso_overlap.py
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from common import RESULTS, save
from torch import nn

import farandole as fd
from farandole.sync import parse

WIDTH, KEPT_MS = 2048, 200.0
EPOCHS, TRACED_EPOCH = 20, 10  # past the synchronous beginning
Interval = tuple[float, float]


def union(intervals: list[Interval]) -> list[Interval]:
    merged: list[Interval] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((begin, end))
    return merged


def common_time(first: list[Interval], second: list[Interval]) -> float:
    return sum(max(0.0, min(b, d) - max(a, c)) for a, b in first for c, d in second)


def kernels(trace: dict[str, Any]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """NCCL's, and all others."""
    found = [event for event in trace["traceEvents"] if event.get("cat") == "kernel"]
    nccl = [event for event in found if "nccl" in event["name"].lower()]
    return nccl, [event for event in found if "nccl" not in event["name"].lower()]


def worker(path: str, rows: int, steps: int) -> None:
    run = fd.init()
    torch.manual_seed(0)
    layers = [layer for _ in range(8) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    model = nn.Sequential(*layers).to(run.device)
    optimizer = torch.optim.SGD(model.parameters(), 1e-6)
    run.distribute(model, optimizer, sync=parse("daso"))
    inputs = torch.randn(rows, WIDTH, device=run.device)  # the same in each step
    turns = torch.utils.data.TensorDataset(torch.zeros(run.size * steps))  # DASO counts epochs
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
    for epoch in run.epochs(EPOCHS):
        if epoch == TRACED_EPOCH and run.rank == 0:
            torch.cuda.synchronize()
            profiler.start()
        for _ in run.loader(turns, batch_size=1):
            optimizer.zero_grad()
            F.mse_loss(model(inputs), inputs).backward()
            optimizer.step()
            run.observe_loss(0.0)
        if epoch == TRACED_EPOCH and run.rank == 0:
            torch.cuda.synchronize()
            profiler.stop()
            profiler.export_chrome_trace(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=4096, help="of a batch: how long a step takes")
    parser.add_argument("--steps", type=int, default=20, help="of an epoch; one is traced")
    parser.add_argument("--trace", metavar="FILE", help=argparse.SUPPRESS)  # for the workers
    options = parser.parse_args()
    if options.trace:
        worker(options.trace, options.rows, options.steps)
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        command = [sys.executable, "-m", "farandole", "run", "--per-gpu", "2"]
        sizes = ["--rows", str(options.rows), "--steps", str(options.steps)]
        environ = {**os.environ, "CUDA_VISIBLE_DEVICES": "0", "FARANDOLE_RUNS": folder}
        subprocess.run(
            [*command, "--pretend-hosts", "2", __file__, "--trace", str(path), *sizes],
            env=environ,
            timeout=280,
            check=True,
        )
        trace = json.loads(path.read_text())
    nccl, others = kernels(trace)
    spans = [union([(e["ts"], e["ts"] + e["dur"]) for e in part]) for part in (nccl, others)]
    exchanged = sum(end - begin for begin, end in spans[0])
    overlapped = common_time(*spans)
    start = min((event["ts"] for event in nccl), default=0.0)
    kept = [e for e in nccl + others if start - 1e3 <= e["ts"] <= start + 1e3 * KEPT_MS]
    with gzip.open(RESULTS / "daso_overlap_trace.json.gz", "wt") as file:
        json.dump({"traceEvents": kept}, file)
    save(
        "daso_overlap",
        {
            "rows": options.rows,
            "steps": options.steps,
            "exchange_kernels": len(nccl),
            "streams": sorted({e["args"].get("stream", -1) for e in nccl + others}),
            "exchange_ms": exchanged / 1e3,
            "overlapped_ms": overlapped / 1e3,
            "overlapped_share": overlapped / exchanged if exchanged else None,
            "trace": "daso_overlap_trace.json.gz",
        },
    )
    print(f"{overlapped / exchanged:.2f} of the exchange went on beside computation")


if __name__ == "__main__":
    main()
