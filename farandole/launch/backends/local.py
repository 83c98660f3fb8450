"""Workers of this host: processes in sessions of their own, forked or started afresh."""

from __future__ import annotations

import contextlib
import os
import platform
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

from farandole.errors import LaunchError
from farandole.launch.backends.base import WorkerSpec
from farandole.launch.endpoint import LauncherEndpoint
from farandole.launch.forks import Forked, ForkError
from farandole.launch.hosts import HERE
from farandole.launch.job import Job
from farandole.launch.job_directory import JobDirectory
from farandole.launch.watches.progress import Progress, progress_of
from farandole.system.orphans import tied_to_this_process
from farandole.worker.marker_files import mark_interrupted
from farandole.worker.network import is_here


class LocalWorker:
    """A process of this host."""

    advice = ""
    stop_margin_seconds = 0.0

    def __init__(self, process: subprocess.Popen[bytes] | Forked, host: str) -> None:
        self._process = process
        self.host = host

    @property
    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> int | None:
        return self._process.poll()

    def progress(self, path: Path) -> Progress:
        return progress_of(self.pid, path)

    def send(self, number: signal.Signals) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.kill(self.pid, number)

    def stop(self) -> None:
        self._send_to_group(signal.SIGTERM)

    def kill(self) -> None:
        self._send_to_group(signal.SIGKILL)

    def _send_to_group(self, number: signal.Signals) -> None:
        """To its children too, except those in sessions of their own: see `JobDirectory.reap`."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                # The worker leads its group (`setsid`), so its id is the group's.
                os.killpg(self.pid, number)


class LocalBackend:
    """Starts workers of this host."""

    def __init__(self, job: Job, directory: JobDirectory, endpoint: LauncherEndpoint) -> None:
        self._job = job
        self._directory = directory
        self._endpoint = endpoint

    def reaches(self, host: str) -> bool:
        return is_here(host)

    def expect(self, host: str, workers: int) -> None:
        """`JobDirectory` has begun what takes time."""

    def await_hosts(self, received: Sequence[str]) -> None:
        """This host is there."""

    def start(self, spec: WorkerSpec) -> LocalWorker:
        directory, number = self._directory, spec.number
        directory.error_file(number).unlink(missing_ok=True)  # an earlier life's
        host = (platform.node() or HERE) if spec.host == HERE else spec.host
        try:
            with contextlib.ExitStack() as files:
                out = err = None  # the launcher's own
                if not directory.is_shown_by_itself(number):
                    out = files.enter_context(_log(directory.stdout_file(number)))
                    err = out
                    if not directory.in_one_file:
                        err = files.enter_context(_log(directory.stderr_file(number)))
                return LocalWorker(self._start(spec, out, err), host)
        except OSError as error:
            raise LaunchError(
                f"cannot start worker {number} on {host}: {error}. Is {self._job.program!r} there? "
                "Start fewer, or ask `farandole doctor` for this machine's limits."
            ) from error

    def mark_interrupted(self) -> None:
        mark_interrupted(self._directory.folder)

    def close(self) -> None:
        """`JobDirectory.reap` ends whatever is left."""

    def _start(
        self, spec: WorkerSpec, out: BinaryIO | None, err: BinaryIO | None
    ) -> subprocess.Popen[bytes] | Forked:
        command = [self._job.program, *self._job.command]
        variables = {
            **os.environ,
            **spec.variables,
            **self._endpoint.local_variables(spec.variables),
            **self._directory.environment(spec.number),
        }
        forks = self._directory.forks
        if forks is not None:
            streams = [0, 1 if out is None else out.fileno(), 2 if err is None else err.fileno()]
            shown = self._directory.identification(spec.number)
            with contextlib.suppress(ForkError):  # a fresh process does as well
                return forks.start(command, variables, streams=streams, shown=shown)
        return subprocess.Popen(
            command,
            env=variables,
            stdout=out,
            stderr=err,
            start_new_session=True,  # Ctrl-C reaches the launcher alone
            preexec_fn=tied_to_this_process(),
        )


def _log(path: Path) -> BinaryIO:
    """For more of a worker's output. A line that its earlier life did not finish ends here."""
    with path.open("a+b") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")
    return path.open("ab")
