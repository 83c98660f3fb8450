"""Processes, by an executor of `concurrent.futures`: our own, mpi4py's, or any other.

An executor does not say which process runs a task, so every process must be able to read every
chunk. Arrays in memory are therefore written once to files that all processes map: on this host
they stay in the system's page cache, and no process copies them. Arrays that are files already
travel by their names. An executor pickles what it is given: this is between its own processes.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import BrokenExecutor, Executor
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from loky import ProcessPoolExecutor

from farandole.errors import FarandoleError
from farandole.learn.pools.base import Placed, Pool, one_blas_thread, sum_branch
from farandole.learn.sources.files import in_files
from farandole.learn.sources.source import Source
from farandole.learn.sums.sum import Statistics, Sum
from farandole.learn.sums.tree import Branch, join, pieces

_PIECES_PER_WORKER = 4


class LostPoolError(FarandoleError):
    """The workers of a pool are gone."""


class OnExecutor(Pool):
    """The executor is the caller's, and stays open."""

    def __init__(self, executor: Executor, workers: int, folder: Path | None = None) -> None:
        self._executor = executor
        self._workers = workers
        self._folder = folder

    @contextmanager
    def place(self, source: Source) -> Iterator[Placed]:
        with TemporaryDirectory(prefix="farandole-learn-", dir=self._folder) as folder:
            yield _OnExecutor(in_files(source, Path(folder)), self._executor, self._workers)


class Processes(Pool):
    """Fresh processes of this host, which end when the source is given back."""

    def __init__(self, workers: int) -> None:
        if workers < 1:
            raise ValueError(f"pool={workers}: a pool has at least 1 process.")
        self._workers = workers

    @contextmanager
    def place(self, source: Source) -> Iterator[Placed]:
        # Those of the standard library run the script once more in each process, unless all of it
        # is behind `if __name__ == "__main__"`. These do not, and are not forked from this process,
        # which may have threads that hold locks.
        with (
            ProcessPoolExecutor(self._workers) as executor,
            OnExecutor(executor, self._workers).place(source) as placed,
        ):
            yield placed


class _OnExecutor(Placed):
    def __init__(self, source: Source, executor: Executor, workers: int) -> None:
        super().__init__(source)
        self._executor = executor
        self._branches = pieces(source.chunks, _PIECES_PER_WORKER * workers)

    def _statistics(self, job: Sum, state: Any) -> Statistics:
        try:
            tasks = [
                self._executor.submit(_work, self.source, job, state, branch)
                for branch in self._branches
            ]
            found = [task.result() for task in tasks]
        except BrokenExecutor as error:
            raise LostPoolError(
                f"a process of the pool was lost in pass {self.passes} over {self.source.name}: "
                f"{error} Was it killed, or out of memory? Fewer rows in a chunk (chunk_rows="
                f"{self.source.chunk_rows // 2 or 1}) need less."
            ) from error
        self.bytes_moved += sum(each.nbytes for part in found for each in part.values())
        total = self.source.chunks
        return join(dict(zip(self._branches, found, strict=True)), total, job.merge)


def _work(source: Source, job: Sum, state: Any, branch: Branch) -> Statistics:
    with one_blas_thread():
        return sum_branch(source, job, state, branch)
