"""The in-process world: many ranks as threads of one process, behind the same interface.

Fast (no processes to start) and deterministic (contributions are combined in rank order). Each
rank gets a real `Run` over a real `Group`; strategies, loaders and checkpoints run as they do
between processes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import torch

# The first optimizer of a process imports this, and with it PyTorch registers operators in tables
# that other threads read without a lock. So it is here before there are any ranks.
import torch._dynamo

from farandole.comm import Exchange, Group, InProcess
from farandole.sync import Strategy
from farandole.topology import Topology
from farandole.train.checkpoint.automatic.policy import Checkpoints
from farandole.train.current_run import current_in_thread
from farandole.train.run import Run
from farandole.train.settings import Settings

T = TypeVar("T")


def run_world(
    size: int,
    body: Callable[[Run], T],
    *,
    folder: Path,
    sync: Strategy | None = None,
    seed: int = 0,
    timeout: timedelta = timedelta(seconds=120),
    topology: Topology | None = None,
    check_finite: bool = True,
    checkpoints: Checkpoints | None = None,
) -> list[T]:
    """Calls `body(run)` on each of `size` ranks at once; returns what each returned, by rank.

    Raises the exception of the rank that failed first; the others are woken from their waits.
    The random state of torch is shared by all threads: draw in `body` from generators of its own.
    """
    exchange = Exchange(size, timeout)
    results: dict[int, T] = {}
    failures: list[BaseException] = []

    def note(rank: int, error: BaseException) -> None:
        if error not in failures:
            failures.append(error)
            exchange.fail(rank, f"failed: {type(error).__name__}: {error}")

    def call(rank: int, run: Run) -> T:
        # Noted before the run is closed: closing it may take what the others wait for, and their
        # complaint would come first.
        try:
            return body(run)
        except BaseException as error:
            note(rank, error)
            raise

    def work(rank: int) -> None:
        try:
            where = topology or Topology.single(size)
            run = Run(
                Group(InProcess(exchange, rank, where)),
                where,
                torch.device("cpu"),
                settings=Settings(sync=sync, name="world", folder=folder, script="world"),
                seed=seed,
                check_finite=check_finite,
                checkpoints=checkpoints,
            )
            with run, current_in_thread(run):
                results[rank] = call(rank, run)
        except BaseException as error:
            note(rank, error)

    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return [results[rank] for rank in range(size)]
