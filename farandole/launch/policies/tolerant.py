"""Runs a tolerant job: a worker that dies is missed, and the others go on.

TorchElastic's agent stops all workers when one fails, which is right where every rank waits for
every other. Under a parameter server nobody does. So here the launcher starts the workers itself,
with the same variables, and decides for each one that ends:

    rank 0, with 0                its part is done; the job is when no other worker runs
    rank 0, in any other way      the job has failed: rank 0 writes logs and checkpoints
    another, with 0               it is done
    another, in any other way     it is started again while it has restarts, or else lost
    one that is stopped (SIGSTOP) the servers give it up; it is then ended, and has failed
    the others, when one is done  they have so long to end as `exit_watch` says

Ctrl-C and signals end such a job as they end any other, and no process is left.
"""

from __future__ import annotations

import platform
import signal
import time
from collections.abc import Callable, Sequence

from farandole.errors import LaunchError
from farandole.launch.exit_watch import ExitWatch, Where
from farandole.launch.job import Job, Outcome
from farandole.launch.job_directory import JobDirectory
from farandole.launch.left import left_by
from farandole.launch.output import Relay
from farandole.launch.processes import (
    Process,
    kill_processes,
    send_to,
    start_process,
    stop_processes,
    tell,
    tell_grace,
)
from farandole.launch.seats import seat_variables
from farandole.launch.stall_watch import StallWatch
from farandole.topology import Topology
from farandole.worker.failure import Failure
from farandole.worker.grace import Grace
from farandole.worker.signals import signals_noted, warnings_passed_on
from farandole.worker.store.hosted import LOOPBACK, JobStore

_POLL_SECONDS = 0.1
_STOPPED_SECONDS = 25.0  # somewhat later than the servers give a silent worker up


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
    place = JobDirectory(job)
    crew = _Crew(job, place, on_lost, on_restart)
    relay = Relay(place.sources())
    kept = False
    with signals_noted() as received, warnings_passed_on(crew.send):
        relay.start()
        try:
            place.prepare(received)
            crew.start()
            while crew.is_at_work() and not received:
                time.sleep(_POLL_SECONDS)
                for line in check() or ():
                    tell(line)
                crew.look_after()
            stopped_by = received[0] if crew.is_at_work() else None
            if stopped_by is not None:
                tell_grace(place, stopped_by, job.grace_seconds)
            elif crew.failure is not None and (stop := left_by([crew.failure])) is not None:
                stopped_by, crew.failure = stop, None
            kept = stopped_by is None and bool(crew.failure or crew.lost)
        finally:
            crew.stop(received)
            joined = crew.has_joined()
            place.reap()
            relay.stop()
            crew.close()
            place.close(keep_logs=kept)
    return Outcome(
        crew.failure,
        (0,) if crew.failure else (),
        stopped_by,
        place.folder if kept else None,
        tuple(sorted(crew.lost)),
        joined,
    )


class _Crew:
    """The workers of one job."""

    def __init__(
        self,
        job: Job,
        place: JobDirectory,
        on_lost: Callable[[int], None],
        on_restart: Callable[[int], None],
    ) -> None:
        self.failure: Failure | None = None  # rank 0's
        self.lost: list[int] = []
        self._job = job
        self._place = place
        self._on_lost = on_lost
        self._on_restart = on_restart
        self._running: dict[int, Process] = {}
        self._restarts = [0] * job.workers
        self._store = JobStore(place.folder)  # for workers that form a group
        self._exits = ExitWatch(job.exit_seconds, stopped_seconds=_STOPPED_SECONDS)
        self._stalls = StallWatch(place.folder, job.stall_seconds, kill=job.stall_kill)
        self._done: int | None = None  # the first that ended with 0

    def start(self) -> None:
        for rank in range(self._job.workers):
            self._start(rank)

    def is_at_work(self) -> bool:
        return self.failure is None and bool(self._running)

    def close(self) -> None:
        self._store.close()

    def has_joined(self) -> bool:
        """Whether any worker took part: by our own calls, or else by torch's, in the store."""
        return self._place.has_joined() or self._store.key_count() > 0

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
        if self._done is None:
            self._done = next((rank for rank, code in ended.items() if code == 0), None)
        overdue = dict(self._exits.look(self._places(), self._done))
        overdue.update(self._stalls.look(self._places()))
        for rank, how in overdue.items():
            failures[rank] = self._end(rank).held_up_others(how)
        self.failure = failures.pop(0, None)
        for rank, failure in failures.items():
            self._miss(rank, failure)

    def _places(self) -> dict[int, Where]:
        host = platform.node() or LOOPBACK
        return {rank: Where(process.pid, host) for rank, process in self._running.items()}

    def _end(self, rank: int) -> Failure:
        """Ends a worker that is waited for in vain."""
        process = self._running.pop(rank)
        stop_processes([process])
        kill_processes([process])
        return self._place.failure(rank, process.poll() or 0, int(time.time()))

    def _miss(self, rank: int, failure: Failure) -> None:
        again = 0 in self._running and self._restarts[rank] < self._job.restarts
        again = again and left_by([failure]) is None  # rank 0 is about to leave, too
        if again:
            self._restarts[rank] += 1
            rest = f"; it is started again ({self._restarts[rank]} of {self._job.restarts})"
        else:
            self.lost.append(rank)
            goes_on = {0: "", 1: "; the other goes on"}
            rest = goes_on.get(len(self._running), "; the others go on")
        tell(f"{failure}{rest if self.failure is None else ''}")
        self._place.kill(rank)  # its children
        self._on_lost(rank)
        if again:
            self._on_restart(rank)
            self._start(rank)

    def send(self, number: signal.Signals) -> None:
        """A signal to every worker."""
        for process in list(self._running.values()):
            send_to(process, number)

    def stop(self, received: Sequence[str] = ()) -> None:
        stop_processes(self._running.values(), Grace(self._job.grace_seconds, received))

    def _start(self, rank: int) -> None:
        command = [self._job.program, *self._job.command]
        variables = self._seat(rank) | self._stalls.expect(rank)
        try:
            self._running[rank] = start_process(self._place, rank, command, variables)
        except OSError as error:
            raise LaunchError(
                f"cannot start worker {rank} of {self._job.workers}: {error}. Start fewer, or "
                "ask `farandole doctor` for this machine's limits."
            ) from error

    def _seat(self, rank: int) -> dict[str, str]:
        """As TorchElastic's agent says it to its workers."""
        return {
            **seat_variables(
                Topology.single(self._job.workers),
                rank,
                address=LOOPBACK,
                port=self._store.port,
                store=self._store.here(),
                identity=self._place.identity,
            ),
            "TORCHELASTIC_RESTART_COUNT": str(self._restarts[rank]),
            "TORCHELASTIC_MAX_RESTARTS": str(self._job.restarts),
        }
