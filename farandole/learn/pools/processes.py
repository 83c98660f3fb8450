"""Fresh processes of this host. One that is killed is replaced, and its piece computed again.

An executor that loses a process breaks as a whole. So each process here has an executor of its own.
To start one takes as long as to import NumPy and SciPy there; a pool that is opened keeps them from
fit to fit:

    with Processes(4) as pool:
        PCA(10, pool=pool).fit(X)
        KMeans(8, pool=pool).fit(X)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import BrokenExecutor, Future, wait
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self
from uuid import uuid4

from loky import ProcessPoolExecutor

from farandole.errors import UserError
from farandole.learn.pools.base import Placed, Pool, one_blas_thread, sum_branch
from farandole.learn.pools.dispatched import SILENCE_SECONDS, Dispatched
from farandole.learn.pools.workers import Workers
from farandole.learn.sources.files import in_files
from farandole.learn.sources.source import Source
from farandole.learn.sums.sum import Statistics, Sum
from farandole.learn.sums.tree import Branch

_FORGET_SECONDS = 1.0  # then a process is still at something that nobody waits for


class Processes(Pool):
    """They end when the source is given back, also those that are stopped; those of a pool that is
    opened (`with`), at its end."""

    def __init__(
        self, workers: int, *, backups: bool = True, timeout: float = SILENCE_SECONDS
    ) -> None:
        if workers < 1:
            raise ValueError(f"pool={workers}: a pool has at least 1 process.")
        self._workers = workers
        self._backups = backups
        self._timeout = timeout
        self._kept: _OwnProcesses | None = None

    def __enter__(self) -> Self:
        if self._kept is not None:
            raise UserError("this pool of processes is open already. Make another one.")
        self._kept = _OwnProcesses(self._workers)
        return self

    def __exit__(self, *exception: object) -> None:
        kept, self._kept = self._kept, None
        if kept is not None:
            kept.close()

    @contextmanager
    def place(self, source: Source) -> Iterator[Placed]:
        with TemporaryDirectory(prefix="farandole-learn-") as folder:
            source = in_files(source, Path(folder))
            processes = self._kept or _OwnProcesses(self._workers)
            try:
                workers = _SourceAtProcesses(source, processes)
                yield Dispatched(
                    source, workers, self._workers, backups=self._backups, timeout=self._timeout
                )
            finally:
                if processes is self._kept:
                    processes.forget()
                else:
                    processes.close()


class _OwnProcesses:
    """By their names."""

    def __init__(self, count: int) -> None:
        self._executors = {f"process {number}": _executor() for number in range(count)}

    def names(self) -> Sequence[str]:
        return list(self._executors)

    def submit(self, name: str, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        found: Future[Any] = self._executors[name].submit(function, *arguments)
        return found

    def replace(self, name: str) -> None:
        """By another process of the same name."""
        self._executors[name].shutdown(wait=False, kill_workers=True)
        self._executors[name] = _executor()

    def forget(self) -> None:
        """What they know of the last source. One that does not answer is replaced."""
        asked = {}
        for name in self.names():
            try:
                asked[self.submit(name, _forget)] = name
            except BrokenExecutor:
                self.replace(name)
        done, busy = wait(asked, _FORGET_SECONDS)
        for future in busy | {future for future in done if future.exception() is not None}:
            self.replace(asked[future])

    def close(self) -> None:
        for executor in self._executors.values():
            # By SIGKILL: one that was stopped, or is still at a piece that somebody else has
            # answered, would be waited for.
            executor.shutdown(wait=True, kill_workers=True)


class _SourceAtProcesses(Workers):
    def __init__(self, source: Source, processes: _OwnProcesses) -> None:
        self._source = source
        self._processes = processes
        self._key = uuid4().hex

    def names(self) -> Sequence[str]:
        return self._processes.names()

    def start(self, worker: str, shared: Any, branch: Branch) -> Future[Statistics]:
        return self._processes.submit(worker, _work, self._key, self._source, *shared, branch)

    def lost(self, worker: str) -> None:
        self._processes.replace(worker)

    def is_loss(self, error: BaseException) -> bool:
        return isinstance(error, BrokenExecutor)


_known: dict[str, Source] = {}
"""In a process: the source of its last task, whose files it has mapped, and whose chunks it has
looked at."""


def _work(key: str, source: Source, job: Sum, state: Any, branch: Branch) -> Statistics:
    if key not in _known:
        _known.clear()
        _known[key] = source
    with one_blas_thread():
        return sum_branch(_known[key], job, state, branch)


def _forget() -> None:
    _known.clear()


def _executor() -> Any:
    # Those of the standard library run the script once more in each process, unless all of it is
    # behind `if __name__ == "__main__"`. These do not, and are not forked from this process, which
    # may have threads that hold locks. They would end a process that has grown by 300 MB, as one
    # that leaks: here it has mapped the files of the source.
    return ProcessPoolExecutor(1, env={"LOKY_MAX_MEMORY_LEAK_SIZE": "1e18"})
