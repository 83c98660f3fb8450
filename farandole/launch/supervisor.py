"""Runs a tolerant job: a worker that dies is missed, and the others go on.

TorchElastic's agent stops all workers when one fails, which is right where every rank waits for
every other. Under a parameter server nobody does. So here the launcher starts the workers itself,
with the same variables, and decides for each one that ends:

    rank 0, with 0                its part is done; the job is when no other worker runs
    rank 0, in any other way      the job has failed: rank 0 writes logs and checkpoints
    another, with 0               it is done
    another, in any other way     it is started again while it has restarts, or else lost

Ctrl-C and signals end such a job as they end any other, and no process is left.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import BinaryIO

from farandole.errors import LaunchError
from farandole.launch.failure import Failure
from farandole.launch.job import Job, Outcome
from farandole.launch.loopback import LOOPBACK, serve_store
from farandole.launch.output import Relay
from farandole.launch.signals import signals_noted
from farandole.launch.workplace import Workplace
from farandole.orphans import end_with_parent

_POLL_SECONDS = 0.1
_STORE_TIMEOUT = timedelta(seconds=60)
_GRACE_SECONDS = 30.0  # the agent's: a worker may save something when it is told to stop


def _nobody(rank: int) -> None:
    """Nobody wants to know."""


def supervise(
    job: Job,
    *,
    on_lost: Callable[[int], None] = _nobody,
    on_restart: Callable[[int], None] = _nobody,
    check: Callable[[], Sequence[str] | None] = lambda: None,
) -> Outcome:
    """Runs `job` to its end and says how it went. Leaves no process behind, whatever happens.

    `on_lost` is called with the rank of each worker that ended badly, then `on_restart` just
    before it is started again, if it is. `check` is called about ten times a second, and returns
    lines to print; what it raises ends the job, and is raised here when all workers are gone.
    """
    place = Workplace(job)
    crew = _Crew(job, place, on_lost, on_restart)
    relay = Relay(place.sources())
    kept = False
    with signals_noted() as received:
        relay.start()
        try:
            crew.start()
            while crew.is_at_work() and not received:
                time.sleep(_POLL_SECONDS)
                for line in check() or ():
                    _tell(line)
                crew.look_after()
            stopped_by = received[0] if crew.is_at_work() else None
            kept = stopped_by is None and bool(crew.failure or crew.lost)
        finally:
            crew.stop()
            place.reap()
            relay.stop()
            if not kept:
                place.remove()
    return Outcome(
        crew.failure,
        (0,) if crew.failure else (),
        stopped_by,
        place.folder if kept else None,
        tuple(sorted(crew.lost)),
    )


class _Crew:
    """The workers of one job."""

    def __init__(
        self,
        job: Job,
        place: Workplace,
        on_lost: Callable[[int], None],
        on_restart: Callable[[int], None],
    ) -> None:
        self.failure: Failure | None = None  # rank 0's
        self.lost: list[int] = []
        self._job = job
        self._place = place
        self._on_lost = on_lost
        self._on_restart = on_restart
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        self._restarts = [0] * job.workers
        self._store = serve_store(_STORE_TIMEOUT)  # for workers that form a group

    def start(self) -> None:
        for rank in range(self._job.workers):
            self._start(rank)

    def is_at_work(self) -> bool:
        return self.failure is None and bool(self._running)

    def look_after(self) -> None:
        """Deals with those that have ended since the last time."""
        found = {rank: process.poll() for rank, process in self._running.items()}
        ended = {rank: code for rank, code in found.items() if code is not None}
        for rank in ended:
            del self._running[rank]
        failures = {
            rank: self._place.failure(rank, code, int(time.time()))
            for rank, code in ended.items()
            if code != 0
        }
        self.failure = failures.pop(0, None)
        for rank, failure in failures.items():
            self._miss(rank, failure)

    def _miss(self, rank: int, failure: Failure) -> None:
        again = 0 in self._running and self._restarts[rank] < self._job.restarts
        if again:
            self._restarts[rank] += 1
            rest = f"; it is started again ({self._restarts[rank]} of {self._job.restarts})"
        else:
            self.lost.append(rank)
            goes_on = {0: "", 1: "; the other goes on"}
            rest = goes_on.get(len(self._running), "; the others go on")
        _tell(f"{failure}{rest if self.failure is None else ''}")
        self._place.kill(rank)  # its children
        self._on_lost(rank)
        if again:
            self._on_restart(rank)
            self._start(rank)

    def stop(self) -> None:
        """Asks those that still run to end, with their children; `Workplace.reap` does the rest."""
        for process in self._running.values():
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
        deadline = time.monotonic() + _GRACE_SECONDS
        for process in self._running.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))

    def _start(self, rank: int) -> None:
        self._place.error_file(rank).unlink(missing_ok=True)  # an earlier life's
        with contextlib.ExitStack() as files:
            out = err = None  # the launcher's own
            if not self._place.is_shown_by_itself(rank):
                out = files.enter_context(_log(self._place.stdout_file(rank)))
                err = files.enter_context(_log(self._place.stderr_file(rank)))
            try:
                self._running[rank] = subprocess.Popen(
                    [sys.executable, *self._job.command],
                    env={**os.environ, **self._seat(rank), **self._place.environment(rank)},
                    stdout=out,
                    stderr=err,
                    start_new_session=True,  # Ctrl-C reaches the launcher alone
                    preexec_fn=end_with_parent,
                )
            except OSError as error:
                raise LaunchError(
                    f"cannot start worker {rank} of {self._job.workers}: {error}. Start fewer, or "
                    "ask `farandole doctor` for this machine's limits."
                ) from error

    def _seat(self, rank: int) -> dict[str, str]:
        """As TorchElastic's agent says it to its workers."""
        size = str(self._job.workers)
        return {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "ROLE_RANK": str(rank),
            "GROUP_RANK": "0",
            "WORLD_SIZE": size,
            "LOCAL_WORLD_SIZE": size,
            "ROLE_WORLD_SIZE": size,
            "GROUP_WORLD_SIZE": "1",
            "ROLE_NAME": "worker",
            "MASTER_ADDR": LOOPBACK,
            "MASTER_PORT": str(self._store.port),
            "TORCHELASTIC_RUN_ID": self._place.identity,
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": str(self._restarts[rank]),
            "TORCHELASTIC_MAX_RESTARTS": str(self._job.restarts),
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get(
                "TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"
            ),
        }


def _log(path: Path) -> BinaryIO:
    """For more of a worker's output. A line that its earlier life did not finish ends here."""
    with path.open("a+b") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")
    return path.open("ab")


def _tell(line: str) -> None:
    """In one piece, so that no worker's line gets into it."""
    with contextlib.suppress(OSError, ValueError):  # nobody reads any more; the job goes on
        sys.stderr.write(f"farandole: {line}\n")
        sys.stderr.flush()
