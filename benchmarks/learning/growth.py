"""Time of one pass of k-means against workers and rows, beside what an α–β model predicts.

A pass with w processes on c cores is predicted to take

    rows · (time of a row alone) / min(w, c)  +  tasks · α  +  bytes / β

where a task costs α, measured with passes over nothing, and the statistics travel at β bytes per
second, measured with passes that only return large ones. All three are measured first.
"""

from __future__ import annotations

import os
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

from farandole.learn.cluster.lloyd import LloydSum
from farandole.learn.pools.base import Placed
from farandole.learn.pools.here import Here
from farandole.learn.pools.processes import Processes
from farandole.learn.sources.chunk import Chunk
from farandole.learn.sources.source import Source
from farandole.learn.sums.sum import Statistics, Sum, as_statistics
from learning.data import CLUSTERS, make


class BytesSum(Sum):
    """Only what travels: `count` numbers from each chunk."""

    def __init__(self, count: int) -> None:
        self.count = count

    def map(self, chunk: Chunk, state: Any) -> Statistics:
        return as_statistics(zeros=np.zeros(self.count))

    def merge(self, left: Statistics, right: Statistics) -> Statistics:
        return left

    def finish(self, statistics: Statistics, state: Any) -> None:
        return None


def _median_seconds(placed: Placed, job: Sum, state: Any, passes: int) -> float:
    placed.sum(job, state)
    taken = []
    for _ in range(passes):
        begin = time.perf_counter()
        placed.sum(job, state)
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken)


def link(workers: int, passes: int) -> dict[str, float]:
    """α and β of a pool of processes."""
    large = 1 << 17
    tasks = 4 * workers
    with Processes(workers).place(Source(np.zeros((tasks, 1)), chunk_rows=1)) as placed:
        nothing = _median_seconds(placed, BytesSum(1), None, passes)
        much = _median_seconds(placed, BytesSum(large), None, passes)
    alpha = nothing / tasks
    beta = 8 * large * tasks / max(1e-9, much - nothing)
    return {"alpha_seconds": alpha, "beta_bytes_per_second": beta}


def growth(
    folder: Path, workers: list[int], rows: list[int], columns: int, passes: int
) -> dict[str, Any]:
    make(folder, max(rows), columns)
    X = np.load(folder / "X.npy", mmap_mode="r")
    start = np.load(folder / "start.npy").astype(np.float64)
    cores = len(os.sched_getaffinity(0))
    alone = min(len(X), 200_000)
    with Here(1).place(Source(np.asarray(X[:alone]))) as placed:
        row_seconds = _median_seconds(placed, LloydSum(), start, passes) / alone
    bytes_of_one = 8 * CLUSTERS * (columns + 1)
    measured = []
    for count in workers:
        costs = link(count, passes)
        for size in rows:
            # A map of its own: a slice of another one has no name, and would be copied.
            rows_of_it = np.memmap(X.filename, X.dtype, "r", X.offset, (size, columns))
            source = Source(rows_of_it)
            with Processes(count).place(source) as placed:
                seconds = _median_seconds(placed, LloydSum(), start, passes)
                tasks = placed.report.passes[-1].counts.pieces
            predicted = size * row_seconds / min(count, cores, source.chunks)
            predicted += tasks * costs["alpha_seconds"]
            predicted += tasks * bytes_of_one / costs["beta_bytes_per_second"]
            one = {"workers": count, "rows": size, "seconds": seconds, "predicted": predicted}
            measured.append({**one, "ratio": seconds / predicted, **costs})
            print(measured[-1], flush=True)
    return {"row_seconds": row_seconds, "cores": cores, "passes": measured}
