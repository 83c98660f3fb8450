"""What a policy decides: which workers run, what the end of one means, when the job is over."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from farandole.launch.job import Outcome
from farandole.launch.watches.exit_watch import ExitWatch, Overdue


class Policy(ABC):
    """The supervisor calls these in one thread, in the order in which they stand here.

    A policy starts and ends workers through the job's `WorkerPool`. What it raises ends the job.
    """

    exit_watch: ExitWatch
    done: int | None = None  # a worker that ended with 0; the others should then end too

    @abstractmethod
    def start(self) -> None:
        """Starts the first workers. Raises `LaunchError` where it cannot."""

    @abstractmethod
    def is_finished(self) -> bool:
        """Whether the job is over, well or not. Workers that still run then are stopped."""

    @abstractmethod
    def on_exits(self, codes: Mapping[int, int]) -> None:
        """These workers have ended since the last time, with these exit codes."""

    @abstractmethod
    def on_overdue(self, workers: Sequence[Overdue]) -> None:
        """These hold up the others, and are to be ended."""

    def tick(self) -> None:  # noqa: B027
        """Some 20 times a second: whatever else is to be looked after, such as hosts."""

    def settle(self) -> None:  # noqa: B027
        """The job is over by itself, and workers that still run have not yet been stopped."""

    @abstractmethod
    def outcome(self, stopped_by: str | None) -> Outcome:
        """How the job ended, when no worker runs any more. `stopped_by` is the signal, if one did.

        The supervisor adds where the logs are, and whether any worker joined.
        """
