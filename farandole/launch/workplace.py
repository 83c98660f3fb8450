"""A job's place on this host: what its workers start with, and what they leave behind.

Everything the workers of a job write goes to one folder, and every process of it, down to the
children of its workers, carries the job's identity among its variables. So its output can be
followed, its failures be read, and whatever is left of it be found.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import uuid
from pathlib import Path

import psutil

from farandole.errors import LaunchError
from farandole.launch.cores import fair_share
from farandole.launch.failure import Failure, read_failure
from farandole.launch.job import Job
from farandole.launch.loopback import stay_on_loopback
from farandole.launch.output import Source
from farandole.orphans import LAUNCHER

_IDENTITY = "FARANDOLE_JOB"
_PATIENCE_SECONDS = 5


class Workplace:
    """Made for one job; raises `LaunchError` where no folder can be made."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self.identity = uuid.uuid4().hex
        try:
            self.folder = Path(tempfile.mkdtemp(prefix="farandole-logs-"))
        except OSError as error:
            raise LaunchError(
                f"cannot keep the workers' output: {error}. Set TMPDIR to a folder with room."
            ) from error

    def environment(self, rank: int) -> dict[str, str]:
        """What a worker starts with, beside its seat and our own variables."""
        defaults = {
            "OMP_NUM_THREADS": str(fair_share(self._job.workers)),
            "PYTHONUNBUFFERED": "1",  # a line shows when it is printed, not when a buffer fills
        }
        stay_on_loopback(defaults)  # here, for scripts that form a process group of their own
        unset = {key: value for key, value in defaults.items() if key not in os.environ}
        return {
            **unset,
            **self._job.environment,
            LAUNCHER: str(os.getpid()),
            _IDENTITY: self.identity,
            "TORCHELASTIC_ERROR_FILE": str(self.error_file(rank)),
        }

    def error_file(self, rank: int) -> Path:
        return self.folder / f"rank-{rank}.error.json"

    def stderr_file(self, rank: int) -> Path:
        return self.folder / f"rank-{rank}.err"

    def stdout_file(self, rank: int) -> Path:
        return self.folder / f"rank-{rank}.out"

    def is_shown_by_itself(self, rank: int) -> bool:
        """Whether this worker writes to the terminal, and not to files."""
        return rank == 0 and self._job.rank0_owns_terminal

    def sources(self) -> list[Source]:
        """What is to be shown, each line with its rank in front."""
        return [
            Source(path, f"[{rank}] ", target)
            for rank in range(self._job.workers)
            if not self.is_shown_by_itself(rank)
            for path, target in (
                (self.stdout_file(rank), sys.stdout.buffer),
                (self.stderr_file(rank), sys.stderr.buffer),
            )
        ]

    def failure(self, rank: int, exit_code: int, noticed_seconds: int) -> Failure:
        """What a worker that ended badly has left."""
        return read_failure(
            rank, exit_code, noticed_seconds, self.error_file(rank), self.stderr_file(rank)
        )

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def reap(self) -> None:
        """Kills what is left of the job, and waits for its end."""
        psutil.wait_procs(self.kill(), timeout=_PATIENCE_SECONDS)

    def kill(self, rank: int | None = None) -> list[psutil.Process]:
        """Kills what is left of the job, or of one worker, such as its data-loading children."""
        left = [process for process in psutil.process_iter() if self._has(process, rank)]
        for process in left:
            try:
                process.kill()
            except psutil.Error:
                continue
        return left

    def _has(self, process: psutil.Process, rank: int | None) -> bool:
        try:
            variables = process.environ()
        except (psutil.Error, OSError):
            return False
        ours = variables.get(_IDENTITY) == self.identity
        return ours and (rank is None or variables.get("RANK") == str(rank))
