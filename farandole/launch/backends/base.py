"""The seam between the supervisor and whatever starts processes: this host, ssh, a scheduler.

A backend starts one worker at a time, and hands out a `Worker`, which is asked and told the same
things wherever it runs. A further backend implements these two protocols, and nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from signal import Signals
from typing import Protocol

from farandole.launch.watches.progress import Progress


@dataclass(frozen=True)
class WorkerSpec:
    """What to start: the job's command as worker `number` of the job, on `host`."""

    number: int  # its rank, or in an elastic job, where ranks change, a number of its own
    host: str
    local_workers: int  # how many workers the host may have, to share its cores among
    variables: Mapping[str, str]  # those that tell it its rank


class Worker(Protocol):
    """A worker that has been started."""

    @property
    def host(self) -> str:
        """Where it runs, as people call it."""

    @property
    def pid(self) -> int | None:
        """Its process; None on another host, where the launcher cannot look at it."""

    @property
    def advice(self) -> str:
        """What the backend adds to the worker's own error; empty if it knows nothing."""

    @property
    def stop_margin_seconds(self) -> float:
        """How much longer than its grace period a stop may take, until the launcher hears of it."""

    def poll(self) -> int | None:
        """Its exit code, negative for a signal; None while it runs."""

    def progress(self, path: Path) -> Progress:
        """How far it has come; on this host, by the activity that it shows in `path`."""

    def send(self, number: Signals) -> None:
        """A signal to the worker alone, not to its children; it goes on, unless that ends it."""

    def stop(self) -> None:
        """Asks it, and its children, to end. Does not wait."""

    def kill(self) -> None:
        """Ends it without asking. Does not wait for its end."""


class Backend(Protocol):
    """Starts workers."""

    def reaches(self, host: str) -> bool:
        """Whether workers can be started on `host`, and can reach the launcher from there."""

    def expect(self, host: str, workers: int) -> None:
        """So many will be started on `host` soon. What takes time there can begin. Does not wait.

        Raises `LaunchError` where they cannot be.
        """

    def await_hosts(self, received: Sequence[str]) -> None:
        """Returns when all hosts that are expected are known to be fit, or a signal is `received`.

        Raises `LaunchError` naming each one that is not. So nothing starts where something is
        wrong.
        """

    def start(self, spec: WorkerSpec) -> Worker:
        """Does not wait for the host. Raises `LaunchError` where it cannot."""

    def mark_interrupted(self) -> None:
        """The user has stopped the job: its runs must not count this as a failure. Does not wait.

        Call it before `close`.
        """

    def close(self) -> None:
        """The job is over: leaves nothing behind but workers, which it was not asked to end."""
