"""Estimators by sums: against other libraries, beyond memory, and as workers and rows grow.

    python benchmarks/learn.py compare [--only kmeans] [--dtype float64] [--dask-python PYTHON]
                                       [--heat-python PYTHON]
    python benchmarks/learn.py memory
    python benchmarks/learn.py growth

`compare`: KMeans, PCA, Lasso and LogisticRegression on 2 million × 50 by Farandole (threads and
processes), scikit-learn with as many threads and, where they are installed, here or for an
interpreter that is named, dask-ml and HeAT. `memory`: a table of four times RLIMIT_AS. `growth`:
the time of a pass beside an α–β prediction. Data are written to --folder, and kept there.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import save
from learning.compare import ALGORITHMS, commands, compare
from learning.data import make
from learning.growth import growth
from learning.memory import write
from learning.side import ITERATIONS

MEMORY = Path(__file__).parent / "learning" / "memory.py"


def run_compare(args: argparse.Namespace) -> dict[str, Any]:
    folder = args.folder / "compare"
    make(folder, args.rows[0], args.columns)
    sides, left_out = commands(args.workers[0], args.dtype, args.dask_python, args.heat_python)
    found = compare(sides, tuple(args.only), folder, args.rounds, args.workers[0], args.seconds)
    for algorithm, judged in found.items():
        ratio = judged["ratio_to_the_fastest"]
        shown = "none" if ratio is None else f"{ratio:.3f}"
        print(f"{algorithm}: ours over the fastest other: {shown}")
    return {
        "rows": args.rows[0],
        "columns": args.columns,
        "dtype": args.dtype,
        "iterations_of_kmeans": ITERATIONS,
        "left_out": left_out,
        "algorithms": found,
    }


def run_memory(args: argparse.Namespace) -> dict[str, Any]:
    limit = args.limit_mib << 20
    rows = int(args.times * limit) // (8 * args.columns)
    path = args.folder / "memory.bin"
    if not path.exists() or path.stat().st_size != 8 * rows * args.columns:
        args.folder.mkdir(parents=True, exist_ok=True)
        write(path, rows, args.columns)
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(__file__).parents[1]),
        # Each thread of BLAS takes address space of its own, and glibc's arenas do too.
        "OPENBLAS_NUM_THREADS": "1",
        "OMP_NUM_THREADS": "1",
        "MALLOC_ARENA_MAX": "2",
    }
    found = {}
    for library in ("farandole", "sklearn"):
        words = [sys.executable, str(MEMORY), str(path), str(rows), str(args.columns)]
        done = subprocess.run(
            [*words, str(limit), library],
            capture_output=True,
            text=True,
            timeout=3600,
            env=environment,
        )
        lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
        found[library] = (
            json.loads(lines[0].removeprefix("RESULT "))
            if lines
            else {"failed": (done.stderr.strip() or "no output").splitlines()[-1][-300:]}
        )
        print(library, found[library], flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["compare", "memory", "growth"])
    parser.add_argument("--rows", type=int, nargs="+", help="one for compare, several for growth")
    parser.add_argument("--columns", type=int, default=50)
    parser.add_argument(
        "--workers", type=int, nargs="+", help="one for compare, several for growth"
    )
    parser.add_argument("--rounds", type=int, help="default: 2 for compare, 3 for growth")
    parser.add_argument("--only", nargs="+", choices=ALGORITHMS, default=list(ALGORITHMS))
    parser.add_argument("--dtype", choices=["float32", "float64"], default="float32")
    parser.add_argument("--seconds", type=float, default=90, help="most that one fit may take")
    parser.add_argument("--limit-mib", type=int, default=1024, help="of address space, for memory")
    parser.add_argument("--times", type=float, default=4.0, help="the table over the limit")
    parser.add_argument("--folder", type=Path, help="for the data (default: a temporary one)")
    parser.add_argument("--dask-python", help="an interpreter with dask-ml")
    parser.add_argument("--heat-python", help="an interpreter with HeAT and mpi4py")
    parser.add_argument("--results", type=Path, help="another folder for the result")
    args = parser.parse_args()
    several = args.what == "growth"
    args.rows = args.rows or ([10**5, 10**6, 10**7] if several else [2_000_000])
    args.workers = args.workers or ([1, 2, 4] if several else [2])
    args.rounds = args.rounds or (3 if several else 2)
    with tempfile.TemporaryDirectory(prefix="learn-") as temporary:
        args.folder = args.folder or Path(temporary)
        if args.what == "compare":
            result = run_compare(args)
        elif args.what == "memory":
            result = run_memory(args)
        else:
            result = growth(
                args.folder / "growth", args.workers, args.rows, args.columns, args.rounds
            )
    options = {} if args.results is None else {"folder": args.results}
    double = args.what == "compare" and args.dtype == "float64"
    save(f"learn_{args.what}{'_float64' if double else ''}", result, **options)


if __name__ == "__main__":
    main()
