"""Fresh processes of this host. One that is killed is replaced, and its piece computed again.

An executor that loses a process breaks as a whole. So each process here has an executor of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import BrokenExecutor, Future
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from loky import ProcessPoolExecutor

from farandole.learn.pools.base import Placed, Pool
from farandole.learn.pools.dispatched import SILENCE_SECONDS, Dispatched
from farandole.learn.pools.executor import work
from farandole.learn.pools.workers import Workers
from farandole.learn.sources.files import in_files
from farandole.learn.sources.source import Source
from farandole.learn.sums.sum import Statistics
from farandole.learn.sums.tree import Branch


class Processes(Pool):
    """They end when the source is given back, also those that are stopped."""

    def __init__(
        self, workers: int, *, backups: bool = True, timeout: float = SILENCE_SECONDS
    ) -> None:
        if workers < 1:
            raise ValueError(f"pool={workers}: a pool has at least 1 process.")
        self._workers = workers
        self._backups = backups
        self._timeout = timeout

    @contextmanager
    def place(self, source: Source) -> Iterator[Placed]:
        with TemporaryDirectory(prefix="farandole-learn-") as folder:
            source = in_files(source, Path(folder))
            workers = _OwnProcesses(source, self._workers)
            try:
                yield Dispatched(
                    source, workers, self._workers, backups=self._backups, timeout=self._timeout
                )
            finally:
                workers.close()


class _OwnProcesses(Workers):
    def __init__(self, source: Source, count: int) -> None:
        self._source = source
        self._executors = {f"process {number}": _executor() for number in range(count)}

    def names(self) -> Sequence[str]:
        return list(self._executors)

    def start(self, worker: str, shared: Any, branch: Branch) -> Future[Statistics]:
        found: Future[Statistics] = self._executors[worker].submit(
            work, self._source, *shared, branch
        )
        return found

    def lost(self, worker: str) -> None:
        self._executors[worker].shutdown(wait=False, kill_workers=True)
        self._executors[worker] = _executor()

    def is_loss(self, error: BaseException) -> bool:
        return isinstance(error, BrokenExecutor)

    def close(self) -> None:
        for executor in self._executors.values():
            # By SIGKILL: one that was stopped, or is still at a piece that somebody else has
            # answered, would be waited for.
            executor.shutdown(wait=True, kill_workers=True)


def _executor() -> Any:
    # Those of the standard library run the script once more in each process, unless all of it is
    # behind `if __name__ == "__main__"`. These do not, and are not forked from this process, which
    # may have threads that hold locks.
    return ProcessPoolExecutor(1)
