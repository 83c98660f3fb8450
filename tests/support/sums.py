"""Sums for tests, apart from them: processes that compute these import no torch."""

from __future__ import annotations

import os
import signal
from typing import Any

import numpy as np
from loky import process_executor

from farandole.learn.sources.chunk import Chunk
from farandole.learn.sums.sum import Statistics, Sum, as_statistics


class Total(Sum):
    """Depends on the order of its additions in nearly every bit."""

    def map(self, chunk: Chunk, state: Any) -> Statistics:
        return as_statistics(total=(chunk.X * chunk.X).sum(axis=0) * state)

    def finish(self, statistics: Statistics, state: Any) -> Any:
        return statistics["total"]


class Deadly(Total):
    def map(self, chunk: Chunk, state: Any) -> Statistics:
        if chunk.number == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().map(chunk, state)


class Raising(Total):
    def map(self, chunk: Chunk, state: Any) -> Statistics:
        if chunk.number == 37:
            raise ZeroDivisionError("in chunk 37")
        return super().map(chunk, state)


class ProcessSum(Sum):
    """The processes that compute."""

    def map(self, chunk: Chunk, state: Any) -> Statistics:
        return as_statistics(processes=[os.getpid()])

    def merge(self, left: Statistics, right: Statistics) -> Statistics:
        return {"processes": np.union1d(left["processes"], right["processes"])}

    def finish(self, statistics: Statistics, state: Any) -> list[int]:
        return [int(process) for process in statistics["processes"]]


class MemoryLimitSum(Sum):
    """By how many bytes a process of loky may grow before it is ended."""

    def map(self, chunk: Chunk, state: Any) -> Statistics:
        return as_statistics(limit=float(process_executor._MAX_MEMORY_LEAK_SIZE))

    def merge(self, left: Statistics, right: Statistics) -> Statistics:
        return left

    def finish(self, statistics: Statistics, state: Any) -> float:
        return float(statistics["limit"])
