"""What a pool does: it takes a source once, and then sums over it, pass after pass.

The chunks stay where they are between passes. Only states go out and statistics come back.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cache
from typing import Any, Self

from threadpoolctl import ThreadpoolController

from farandole.learn.progress import PassProgress
from farandole.learn.report import Counts, Pass, Report
from farandole.learn.sources.source import Source
from farandole.learn.sums.sum import Statistics, Sum
from farandole.learn.sums.tree import Branch, reduce


class Placed(ABC):
    """A source whose chunks are with the workers."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.passes = 0
        self.counts = Counts()  # of all passes
        self.report = Report()
        self.progress = PassProgress()

    def sum(self, job: Sum, state: Any = None) -> Any:
        """One pass: the new state."""
        if not self.source.chunks:
            raise ValueError(f"{self.source.name} has no rows: there is nothing to sum over.")
        self.passes += 1
        before, began = replace(self.counts), time.perf_counter()
        statistics = self._statistics(job, state)
        seconds = time.perf_counter() - began
        self.report.passes.append(Pass(type(job).__name__, seconds, self.counts.since(before)))
        self.progress.passed(self.passes, seconds, self.report.bytes_moved)
        return job.finish(statistics, state)

    @abstractmethod
    def _statistics(self, job: Sum, state: Any) -> Statistics: ...


class Pool(ABC):
    """Workers. One may be used for many sources, one after the other."""

    @abstractmethod
    def place(self, source: Source) -> AbstractContextManager[Placed]:
        """Brings the chunks to the workers. Gives back what that took at the end."""

    def __deepcopy__(self, memo: Any) -> Self:
        return self  # copies of an estimator, such as those of a search, have the same workers


def sum_branch(source: Source, job: Sum, state: Any, branch: Branch) -> Statistics:
    """What one worker does."""

    def leaf(number: int) -> Statistics:
        if not job.in_blocks:
            return job.map(source.read(number), state)
        blocks = source.blocks(number)
        return reduce((0, len(blocks)), lambda at: job.map(blocks[at](), state), job.merge)

    return reduce(branch, leaf, job.merge)


def one_blas_thread() -> AbstractContextManager[Any]:
    """Inside, a product of matrices takes one core: workers take the others, and the rounding of a
    product may depend on the number of its threads. It holds for the whole process."""
    limited: AbstractContextManager[Any] = _libraries().limit(limits=1)
    return limited


@cache
def _libraries() -> Any:
    """Looked for once: that takes milliseconds, and a pass may take less."""
    return ThreadpoolController()
