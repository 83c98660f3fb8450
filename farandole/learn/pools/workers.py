"""What a pool of separate workers is: names, and a way to start a task at one of them.

Each worker has one task at a time, so that whoever hands tasks out knows who is slow and who is
lost. See `dispatch`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from concurrent.futures import Future
from typing import Any

from farandole.errors import FarandoleError
from farandole.learn.sums.sum import Statistics, Sum
from farandole.learn.sums.tree import Branch


class LostPoolError(FarandoleError):
    """The workers of a pool are gone, or do not answer."""


class Workers(ABC):
    """Those who compute the sums of one source. `are_threads`: of this process."""

    are_threads = False

    @abstractmethod
    def names(self) -> Sequence[str]:
        """Who takes tasks now. Asked at the beginning of a pass and after a loss: one that is new
        here is used, also in place of one that was lost."""

    def begin(self, job: Sum, state: Any) -> Any:
        """A pass begins: what `start` gets for each of its tasks."""
        return job, state

    @abstractmethod
    def start(self, worker: str, shared: Any, branch: Branch) -> Future[Statistics]:
        """The statistics of a branch, by this worker. May raise what `is_loss` knows."""

    @abstractmethod
    def is_loss(self, error: BaseException) -> bool:
        """Whether this means that the worker is lost, rather than that its task is wrong."""

    def lost_elsewhere(self, worker: str, error: BaseException) -> bool:
        """Whether it is a loss, but not of `worker`: its task needed what went with another."""
        return False

    @abstractmethod
    def lost(self, worker: str) -> None:
        """It is; another may take its place."""

    def gone(self, workers: Collection[str]) -> Collection[str]:
        """Those of `workers` that are lost, where their tasks would not say so."""
        return ()

    def abandon(self, future: Future[Statistics]) -> bool:
        """Nobody waits for this any more. Whether it ends at once."""
        return False

    def cause(self, error: BaseException) -> BaseException:
        """What the task itself has raised."""
        return error
