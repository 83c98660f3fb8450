"""This process: threads, each with a branch of the chunks at a time.

NumPy and BLAS let other threads run while they compute, and threads share the arrays.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from farandole.learn.pools.base import Placed, Pool, one_blas_thread, sum_branch
from farandole.learn.sources.source import Source
from farandole.learn.sums.sum import Statistics, Sum
from farandole.learn.sums.tree import join, pieces
from farandole.system.cores import usable_cores

_PIECES_PER_THREAD = 4


class Here(Pool):
    """With as many threads as there are cores, or `threads`."""

    def __init__(self, threads: int | None = None) -> None:
        self.threads = threads or usable_cores()

    @contextmanager
    def place(self, source: Source) -> Iterator[Placed]:
        if self.threads == 1 or source.chunks <= 1:
            yield _PlacedHere(source, None, 1)
            return
        with ThreadPoolExecutor(self.threads, "farandole-learn") as executor:
            yield _PlacedHere(source, executor, self.threads)


class _PlacedHere(Placed):
    def __init__(self, source: Source, executor: ThreadPoolExecutor | None, threads: int) -> None:
        super().__init__(source)
        self._executor = executor
        self._branches = pieces(source.chunks, _PIECES_PER_THREAD * threads)

    def _statistics(self, job: Sum, state: Any) -> Statistics:
        def work(branch: tuple[int, int]) -> Statistics:
            return sum_branch(self.source, job, state, branch)

        with one_blas_thread():
            if self._executor is None:
                found = list(map(work, self._branches))
            else:
                found = list(self._executor.map(work, self._branches))
        total = self.source.chunks
        return join(dict(zip(self._branches, found, strict=True)), total, job.merge)
