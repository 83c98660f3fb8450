"""Starting the workers that the launcher looks after itself, stopping them, and saying so."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, Protocol

from farandole.launch.forks import ForkError
from farandole.launch.job_directory import JobDirectory
from farandole.system.orphans import tied_to_this_process
from farandole.system.process_state import is_stopped
from farandole.worker.grace import Grace
from farandole.worker.saving import any_saves

_KILLED_SECONDS = 5.0
_POLL_SECONDS = 0.05


class Process(Protocol):
    """A worker of this host, in a session of its own."""

    pid: int

    def poll(self) -> int | None:
        """Its exit code, negative for a signal; None while it runs."""

    def wait(self, timeout: float | None = None) -> int:
        """The same when it has ended. Raises `subprocess.TimeoutExpired`."""


def start_process(
    place: JobDirectory, worker: int, command: Sequence[str], environment: Mapping[str, str]
) -> Process:
    """Starts a worker of this host in a session of its own. Raises `OSError` where it cannot."""
    place.error_file(worker).unlink(missing_ok=True)  # an earlier life's
    with contextlib.ExitStack() as files:
        out = err = None  # the launcher's own
        if not place.is_shown_by_itself(worker):
            out = files.enter_context(_log(place.stdout_file(worker)))
            err = out if place.in_one_file else files.enter_context(_log(place.stderr_file(worker)))
        variables = {**os.environ, **environment, **place.environment(worker)}
        if place.forks is not None:
            streams = [0, 1 if out is None else out.fileno(), 2 if err is None else err.fileno()]
            with contextlib.suppress(ForkError):  # a fresh process does as well
                return place.forks.start(
                    command, variables, streams=streams, shown=place.identification(worker)
                )
        return subprocess.Popen(
            command,
            env=variables,
            stdout=out,
            stderr=err,
            start_new_session=True,  # Ctrl-C reaches the launcher alone
            preexec_fn=tied_to_this_process(),
        )


def stop_processes(processes: Iterable[Process], grace: Grace | None = None) -> None:
    """Asks those that still run to end, with their children; `JobDirectory.reap` does the rest.

    A stopped process would not hear of it, and has nothing to save: it is killed at once.
    """
    running = [process for process in processes if process.poll() is None]
    for process in running:
        _send(process, signal.SIGKILL if is_stopped(process.pid) else signal.SIGTERM)
    grace = grace or Grace()
    while running and not grace.is_over():
        time.sleep(_POLL_SECONDS)
        running = [process for process in running if process.poll() is None]
        for process in running:
            if is_stopped(process.pid):
                _send(process, signal.SIGKILL)


def kill_processes(processes: Iterable[Process]) -> None:
    """Asks no more. One that the system itself holds (state D) is named, and not waited for."""
    running = [process for process in processes if process.poll() is None]
    for process in running:
        _send(process, signal.SIGKILL)
    deadline = time.monotonic() + _KILLED_SECONDS
    for process in running:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            tell(
                f"process {process.pid} does not end, {_KILLED_SECONDS:g} s after SIGKILL: a "
                "device or a network file system holds it"
            )


def send_to(process: Process, number: signal.Signals) -> None:
    """To this worker alone, and not to its children."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, number)


def tell_grace(place: JobDirectory, stopped_by: str, seconds: float) -> None:
    """Says how long the job has, if any of its workers saves before it leaves."""
    if any_saves(place.folder):
        tell(f"{stopped_by}: the workers have {seconds:g} s to save and leave (--grace)")


def _send(process: Process, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has just ended
        os.killpg(process.pid, number)


def tell(line: str) -> None:
    """What the launcher itself has to say."""
    write_error(f"farandole: {line}\n")


def write_error(text: str) -> None:
    """In one piece, so that no worker's line gets into it."""
    with contextlib.suppress(OSError, ValueError):  # nobody reads any more; the job goes on
        sys.stderr.write(text)
        sys.stderr.flush()


def _log(path: Path) -> BinaryIO:
    """For more of a worker's output. A line that its earlier life did not finish ends here."""
    with path.open("a+b") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")
    return path.open("ab")
