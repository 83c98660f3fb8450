"""What a job is, and how it ended: the words that all ways of running one share."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from farandole.errors import LaunchError, UserError
from farandole.worker.failure import Failure
from farandole.worker.grace import DEFAULT_SECONDS
from farandole.worker.run_report import RunReport
from farandole.worker.signals import exit_code_of


@dataclass(frozen=True)
class Job:
    """A script to run on `workers` processes.

    In a tolerant job a worker that fails is only missed, unless it is rank 0, which writes logs
    and checkpoints; each may be started again up to `restarts` times.
    """

    workers: int
    command: Sequence[str]  # what follows `python`: a script and its arguments, or -m module …
    environment: Mapping[str, str] = field(default_factory=dict)
    rank0_owns_terminal: bool = False  # rank 0 writes to the terminal itself, so it can redraw
    tolerant: bool = False
    restarts: int = 0
    program: str = sys.executable  # what the command follows, where it is not this Python
    per_rank: Sequence[Mapping[str, str]] = ()  # further variables of each worker
    output: Path | None = None  # a folder that keeps rank.N/stdout and rank.N/stderr
    timed_output: bool = False  # each line that is shown begins with the time
    # Many workers may be forked from one process that has imported torch. This process then adopts
    # its orphans (`orphans.adopt_orphans`), which only a program of our own should do. None: only
    # on other hosts, where an agent, which is one, starts them.
    fork: bool | None = None
    exit_seconds: float | None = None  # for the others, once a worker is done; see `exit_watch`
    stall_seconds: float | None = None  # without a step, then a worker is named; see `stall_watch`
    stall_kill: bool = False  # and is ended
    grace_seconds: float = DEFAULT_SECONDS  # between SIGTERM and SIGKILL
    # Called some 20 times a second, in the launcher, for what the workers cannot do without. It
    # raises `LostResourceError`, which ends this attempt.
    check: Callable[[], None] | None = None

    def __post_init__(self) -> None:
        if self.per_rank and len(self.per_rank) != self.workers:
            raise UserError(
                f"per_rank has variables for {len(self.per_rank)} workers, and there are "
                f"{self.workers}."
            )
        if self.workers < 1:
            raise UserError(f"{self.workers} workers cannot run anything; ask for 1 or more.")
        if self.exit_seconds is not None and not self.exit_seconds > 0:
            raise UserError(
                f"exit_seconds={self.exit_seconds:g}: give the seconds, above 0, that workers have "
                "to end once the first is done; inf sets no limit."
            )
        if self.stall_seconds is not None and not self.stall_seconds > 0:
            raise UserError(f"stall_seconds={self.stall_seconds:g} must be above 0.")
        if self.stall_kill and self.stall_seconds is None:
            raise UserError("stall_kill=True: give stall_seconds too, the time without a step.")
        if not 0 < self.grace_seconds < float("inf"):
            raise UserError(
                f"grace_seconds={self.grace_seconds:g}: give the seconds, above 0, that workers "
                "have to save and leave when the job is stopped."
            )
        if self.restarts < 0:
            raise UserError(f"restarts={self.restarts}: a worker is started again 0 times or more.")
        if self.restarts and not self.tolerant:
            raise UserError(
                f"restarts={self.restarts}: only in a tolerant job is one worker started again; "
                "in others all stop together."
            )


class LostResourceError(LaunchError):
    """What all workers of a job need has ended under them; `how` says so without a next step."""

    def __init__(self, how: str) -> None:
        super().__init__(f"{how}. Start the job again, or let --restarts do that.")
        self.how = how
        self.report: RunReport | None = None
        """Of the run, as in `Outcome`."""


@dataclass(frozen=True)
class Outcome:
    """How a job ended.

    `failure` is the cause, `failed` every rank that ended badly with it, and `lost` those that a
    tolerant job went on without.
    """

    failure: Failure | None = None
    failed: tuple[int, ...] = ()
    stopped_by: str | None = None  # the signal that the launcher was stopped with
    logs: Path | None = None  # kept only when a worker failed or was lost
    lost: tuple[int, ...] = ()
    joined: bool = True  # some worker took part, as far as the launcher can tell
    report: RunReport | None = None  # of the run, if the job may be started again
    received: str | None = None  # a signal to stop that came, also when the job was over already

    @property
    def exit_code(self) -> int:
        if self.stopped_by is not None:
            return exit_code_of(self.stopped_by)
        if self.failure is None:
            return 0
        code = self.failure.exit_code
        return code if code > 0 else 128 - code
