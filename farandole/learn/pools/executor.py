"""Processes, by an executor of `concurrent.futures`: mpi4py's, or any other.

An executor does not say which process runs a task, so every process must be able to read every
chunk. Arrays in memory are therefore written once to files that all processes map: on this host
they stay in the system's page cache, and no process copies them. Arrays that are files already
travel by their names. An executor pickles what it is given: this is between its own processes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import BrokenExecutor, Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from farandole.learn.pools.base import Placed, Pool, one_blas_thread, sum_branch
from farandole.learn.pools.dispatched import Dispatched
from farandole.learn.pools.workers import Workers
from farandole.learn.sources.files import in_files
from farandole.learn.sources.source import Source
from farandole.learn.sums.sum import Statistics, Sum
from farandole.learn.sums.tree import Branch


class OnExecutor(Pool):
    """The executor is the caller's, and stays open."""

    def __init__(self, executor: Executor, workers: int, *, backups: bool = True) -> None:
        self._executor = executor
        self._workers = workers
        self._backups = backups

    @contextmanager
    def place(self, source: Source) -> Iterator[Placed]:
        with TemporaryDirectory(prefix="farandole-learn-") as folder:
            source = in_files(source, Path(folder))
            workers = _ExecutorWorkers(source, self._executor, self._workers)
            yield Dispatched(source, workers, self._workers, backups=self._backups)


class _ExecutorWorkers(Workers):
    """As many as the executor has. They are names only: the executor chooses."""

    def __init__(self, source: Source, executor: Executor, count: int) -> None:
        self._source = source
        self._executor = executor
        self.are_threads = isinstance(executor, ThreadPoolExecutor)
        self._names = [f"worker {number} of the executor" for number in range(count)]
        self._broken = False

    def names(self) -> Sequence[str]:
        return [] if self._broken else self._names

    def start(self, worker: str, shared: Any, branch: Branch) -> Future[Statistics]:
        job, state = shared
        return self._executor.submit(_work, self._source, job, state, branch)

    def is_loss(self, error: BaseException) -> bool:
        return isinstance(error, BrokenExecutor)

    def lost(self, worker: str) -> None:
        # One lost process breaks all of an executor, and nothing can be started there any more.
        self._broken = True

    def abandon(self, future: Future[Statistics]) -> bool:
        return future.cancel()  # if it has not begun


def _work(source: Source, job: Sum, state: Any, branch: Branch) -> Statistics:
    """What a process does."""
    with one_blas_thread():
        return sum_branch(source, job, state, branch)
