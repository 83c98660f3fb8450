"""Benchmarks on two emulated hosts: a script starts itself again there and judges what it found.

The process that the user starts is the controller. It makes the hosts (so it needs root), starts
the same script as every rank on them, with the variables that torchrun would set, and judges the
result against the targets. The ranks share the machine's cores evenly and compute on those alone:
GPUs are hidden.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from common import RESULTS, save

import farandole as fd
from farandole.emulate.cluster import Cluster
from farandole.system.cores import fair_share
from farandole.worker.signals import signals_noted

HOSTS = 2
TIMEOUT_SECONDS = 600.0
_POLL_SECONDS = 0.1
RESULT_FILE = "BENCHMARK_RESULT_FILE"
"""Where rank 0 writes what it found. Set for ranks only, so it tells them from the controller."""

Work = Callable[[fd.Run, argparse.Namespace], dict[str, Any]]


@dataclass(frozen=True)
class Target:
    """A figure that must not be above a limit."""

    what: str
    value: float | None  # None: there is no figure, because something was never reached
    at_most: float

    @property
    def met(self) -> bool:
        return self.value is not None and self.value <= self.at_most

    def __str__(self) -> str:
        value = "never reached" if self.value is None else f"{self.value:.3f}"
        return f"{self.what}: {value} (target {self.at_most:g}, {'met' if self.met else 'missed'})"


def add_options(
    parser: argparse.ArgumentParser, *, rate: str, workers_per_host: int, save_as: str
) -> None:
    """What all of these scripts take."""
    parser.add_argument("--rate", default=rate, help=f"of each host's link [{rate}]")
    parser.add_argument("--workers-per-host", type=int, default=workers_per_host)
    parser.add_argument("--save", default=save_as, metavar="NAME", help="of the result file")
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="DIR", help="and its folder")


def on_hosts(args: argparse.Namespace, work: Work) -> dict[str, Any]:
    """What `work(run, args)` returned on rank 0. Returns in the controller only: ranks exit."""
    if RESULT_FILE in os.environ:
        _take_part(args, work, Path(os.environ[RESULT_FILE]))
        sys.exit()
    with tempfile.TemporaryDirectory(prefix="farandole-benchmark-") as folder:
        file = Path(folder) / "result.json"
        _run_ranks(args.rate, args.workers_per_host, file)
        found: dict[str, Any] = json.loads(file.read_text())
    return found


def keep(args: argparse.Namespace, result: dict[str, Any], targets: Sequence[Target]) -> None:
    """Saves the result with its settings and its targets, and prints the targets last."""
    settings = {
        name: value for name, value in vars(args).items() if name not in ("data", "out", "save")
    }
    judged = [{**asdict(target), "met": target.met} for target in targets]
    save(args.save, {"settings": settings, **result, "targets": judged}, args.out)
    for target in targets:
        print(target)


def _run_ranks(rate: str, workers_per_host: int, file: Path) -> None:
    """Until all have ended. Exits when one fails, or when a signal says so; no rank is left."""
    size = HOSTS * workers_per_host
    common = {
        RESULT_FILE: str(file),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(workers_per_host),
        "OMP_NUM_THREADS": str(fair_share(size)),
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONUNBUFFERED": "1",
    }
    with signals_noted() as received, Cluster(HOSTS, rate) as cluster:
        ranks = []
        for rank in range(size):
            host, local_rank = divmod(rank, workers_per_host)
            env = {**common, "RANK": str(rank), "LOCAL_RANK": str(local_rank)}
            ranks.append(cluster.start(host, [sys.executable, *sys.argv], env=env))
        _wait(ranks, received)


def _wait(ranks: Sequence[subprocess.Popen[str]], received: Sequence[str]) -> None:
    while True:
        codes = [process.poll() for process in ranks]
        if received:
            sys.exit(f"stopped by {received[0]}")
        for rank, code in enumerate(codes):
            if code:
                sys.exit(f"rank {rank} ended with exit code {code}; what it said is above")
        if None not in codes:
            return
        time.sleep(_POLL_SECONDS)


def _take_part(args: argparse.Namespace, work: Work, file: Path) -> None:
    run = fd.init(timeout=TIMEOUT_SECONDS, folder=file.parent)
    result = work(run, args)
    if run.rank == 0:
        file.write_text(json.dumps(result))
