"""A job's place on this host: what its workers start with, and what they leave behind.

Everything the workers of a job write goes to one folder, and every process of it, down to the
children of its workers, carries the job's identity among its variables. So its output can be
followed, its failures be read, and whatever is left of it be found: by the launcher at the end of
the job, or by a watchdog if the launcher is killed.
"""

from __future__ import annotations

import os
import sys
import uuid
from collections.abc import Collection
from pathlib import Path
from typing import TextIO

import psutil

from farandole.environment import GRACE, LAUNCHER, SIMULATED_LINK, SIMULATED_LINK_FILE
from farandole.errors import LaunchError
from farandole.launch.forks import FEWEST_ON_EACH_HOST, FEWEST_ON_ONE_HOST, Forks
from farandole.launch.job import Job
from farandole.launch.old_logs import LOGS, remove_old_folders
from farandole.launch.output import Source
from farandole.system.cores import fair_share
from farandole.system.job_processes import IDENTITY, kill_leftovers
from farandole.system.owned_folders import OwnedFolder
from farandole.system.watchdog import Watchdog
from farandole.worker.failure import Failure, read_failure
from farandole.worker.forking.forked import is_script
from farandole.worker.loopback import stay_on_loopback
from farandole.worker.marker_files import any_joined

_PATIENCE_SECONDS = 5


def worker_defaults(here: int, *, alone: bool) -> dict[str, str]:
    """What each of the workers `here` starts with, where the user says nothing else."""
    defaults = {
        "OMP_NUM_THREADS": str(fair_share(here)),
        "PYTHONUNBUFFERED": "1",  # a line shows when it is printed, not when a buffer fills
    }
    if alone:
        stay_on_loopback(defaults)  # here, for scripts that form a process group of their own
    return {key: value for key, value in defaults.items() if key not in os.environ}


class JobDirectory:
    """Made for one job; raises `LaunchError` where no folder can be made.

    Workers go by their ranks, or by the number in `worker_variable` where ranks change. `here` is
    how many of them are on this host, if some are on others.
    """

    def __init__(self, job: Job, worker_variable: str = "RANK", *, here: int | None = None) -> None:
        self._job = job
        self._here = here
        self._output = {} if job.output is None else _output_files(job.output, job.workers)
        self.worker_variable = worker_variable
        self.identity = uuid.uuid4().hex
        self.in_one_file = not self._output and _is_one_file(sys.stdout, sys.stderr)
        try:
            remove_old_folders()
            self._logs = OwnedFolder(LOGS, self.identity)
        except OSError as error:
            raise LaunchError(
                f"cannot keep the workers' output: {error}. Set TMPDIR to a folder with room."
            ) from error
        self._watchdog = Watchdog(variables={IDENTITY: self.identity}, folders=[self.folder])
        self.forks = Forks.inherited() or self._begin_forks()

    def _begin_forks(self) -> Forks | None:
        """A fork server for a launcher that was not forked itself, where it pays."""
        job, here = self._job, self._workers_here()
        fewest = FEWEST_ON_ONE_HOST if self._here is None else FEWEST_ON_EACH_HOST
        if not job.fork or here < fewest or not is_script([job.program, *job.command]):
            return None
        defaults = worker_defaults(here, alone=self._here is None)
        return Forks.begin({**os.environ, **defaults, **job.environment})

    def _workers_here(self) -> int:
        return self._job.workers if self._here is None else self._here

    def prepare(self, received: Collection[str]) -> None:
        """Waits until workers can be forked, if they are to be. Not if a signal was received."""
        if self.forks is not None and not self.forks.wait(lambda: bool(received)):
            self.forks.close()
            self.forks = None

    @property
    def folder(self) -> Path:
        return self._logs.path

    def environment(self, rank: int) -> dict[str, str]:
        """What a worker starts with, beside its rank and our own variables."""
        link = {}
        if SIMULATED_LINK in self._job.environment:
            link[SIMULATED_LINK_FILE] = str(self.folder / "link")
        return {
            **worker_defaults(self._workers_here(), alone=self._here is None),
            **self._job.environment,
            **(self._job.per_rank[rank] if self._job.per_rank else {}),
            GRACE: f"{self._job.grace_seconds:g}",
            LAUNCHER: str(os.getpid()),
            IDENTITY: self.identity,
            **link,
            "TORCHELASTIC_ERROR_FILE": str(self.error_file(rank)),
        }

    def error_file(self, rank: int) -> Path:
        return self.folder / f"rank-{rank}.error.json"

    def stderr_file(self, rank: int) -> Path:
        """The same as for standard output where both are shown in one place: so their order stays.

        Where they are shown apart, nobody sees an order between them.
        """
        if self.in_one_file:
            return self.stdout_file(rank)
        return self._output[rank] / "stderr" if self._output else self.folder / f"rank-{rank}.err"

    def stdout_file(self, rank: int) -> Path:
        return self._output[rank] / "stdout" if self._output else self.folder / f"rank-{rank}.out"

    def is_shown_by_itself(self, rank: int) -> bool:
        """Whether this worker writes to the terminal, and not to files."""
        return rank == 0 and self._job.rank0_owns_terminal

    def sources(self) -> list[Source]:
        """What is to be shown, each line with its rank in front."""
        return [source for rank in range(self._job.workers) for source in self.sources_of(rank)]

    def sources_of(self, rank: int) -> list[Source]:
        """The same for one worker."""
        if self.is_shown_by_itself(rank):
            return []
        shown = {self.stderr_file(rank): sys.stderr.buffer}
        shown[self.stdout_file(rank)] = sys.stdout.buffer  # the same file, perhaps
        return [
            Source(path, f"[{rank}] ", target, timed=self._job.timed_output)
            for path, target in shown.items()
        ]

    def failure(self, rank: int, exit_code: int, noticed_seconds: int) -> Failure:
        """What a worker that ended badly has left."""
        return read_failure(
            rank, exit_code, noticed_seconds, self.error_file(rank), self.stderr_file(rank)
        )

    def has_joined(self) -> bool:
        """Whether any worker of this host has called `fd.init` or `hvd.init`."""
        return any_joined(self.folder)

    def close(self, *, keep_logs: bool) -> None:
        """The job is over. Logs that are kept stay for a week."""
        self._logs.close(keep=keep_logs)
        self._watchdog.close()

    def reap(self) -> None:
        """Kills what is left of the job, and waits for its end."""
        if self.forks is not None:
            self.forks.close()
            self.forks = None
        psutil.wait_procs(self.kill(), timeout=_PATIENCE_SECONDS)

    def identification(self, worker: int) -> dict[str, str]:
        """The variables by which `kill` finds a worker."""
        return {IDENTITY: self.identity, self.worker_variable: str(worker)}

    def kill(self, rank: int | None = None) -> list[psutil.Process]:
        """Kills what is left of the job, or of one worker, such as its data-loading children."""
        return kill_leftovers(self.identity, rank, self.worker_variable)


def _is_one_file(first: TextIO, second: TextIO) -> bool:
    """Whether both lead to the same place: a terminal, a pipe, a file after `2>&1`."""
    try:
        return os.path.sameopenfile(first.fileno(), second.fileno())
    except (OSError, ValueError):  # at least one is no file
        return False


def _output_files(folder: Path, workers: int) -> dict[int, Path]:
    """A folder for each rank, without what an earlier job has left in it."""
    digits = len(str(workers - 1))  # so that they sort as their numbers do
    found = {rank: folder / f"rank.{rank:0{digits}}" for rank in range(workers)}
    try:
        for place in found.values():
            place.mkdir(parents=True, exist_ok=True)
            for name in ("stdout", "stderr"):
                (place / name).unlink(missing_ok=True)
    except OSError as error:
        raise LaunchError(
            f"cannot keep the workers' output in {folder}: {error}. Name a folder that you can "
            "write to."
        ) from error
    return found
