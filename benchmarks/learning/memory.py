"""A table of four times the memory that a process may have: does it fit a model, and in how much?

The process is limited by RLIMIT_AS, which counts every mapping, so that the file cannot be mapped
either: rows are read as a dataset of HDF5 would, one slice at a time.

    python memory.py FOLDER ROWS COLUMNS LIMIT_BYTES LIBRARY
"""

from __future__ import annotations

import json
import resource
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np


class RowsOfAFile:
    """float64 in a plain file. A slice reads those rows, and maps nothing."""

    ndim = 2
    dtype = np.dtype(np.float64)

    def __init__(self, path: Path, rows: int, columns: int) -> None:
        self.path = path
        self.shape = (rows, columns)

    def __getitem__(self, rows: slice) -> Any:
        first, end, _ = rows.indices(self.shape[0])
        columns = self.shape[1]
        count = (end - first) * columns
        found = np.fromfile(self.path, self.dtype, count, offset=8 * first * columns)
        return found.reshape(-1, columns)


def write(path: Path, rows: int, columns: int) -> None:
    random = np.random.default_rng(0)
    centres = random.normal(size=(8, columns)) * 3
    temporary = path.with_suffix(".tmp")
    with temporary.open("wb") as file:
        for first in range(0, rows, 1 << 15):
            count = min(1 << 15, rows - first)
            part = centres[random.integers(0, 8, count)] + random.normal(size=(count, columns))
            part.tofile(file)
    temporary.replace(path)


def main() -> None:
    path, rows, columns, limit, library = (Path(sys.argv[1]), *sys.argv[2:])
    table = RowsOfAFile(path, int(rows), int(columns))
    if library == "farandole":
        from farandole.learn import PCA, KMeans
        from farandole.learn.pools.here import Here

        estimators = {
            "pca": PCA(10, pool=Here(2)),
            "kmeans": KMeans(8, max_iter=5, tol=0, random_state=0, pool=Here(2)),
        }
    else:
        from sklearn import cluster, decomposition

        estimators = {
            "pca": decomposition.PCA(10),
            "kmeans": cluster.KMeans(8, n_init=1, max_iter=5),
        }
    resource.setrlimit(resource.RLIMIT_AS, (int(limit), int(limit)))
    found: dict[str, Any] = {"table_bytes": 8 * int(rows) * int(columns), "limit_bytes": int(limit)}
    for name, estimator in estimators.items():
        begin = time.perf_counter()
        try:
            data = table if library == "farandole" else table[slice(0, int(rows))]
            estimator.fit(data)
            found[name] = {"seconds": time.perf_counter() - begin}
        except MemoryError as error:
            found[name] = {"failed": f"MemoryError: {error}"[:200]}
    found["peak_rss_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print("RESULT " + json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
