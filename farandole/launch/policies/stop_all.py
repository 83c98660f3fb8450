"""Runs a job whose workers start together and stop together, wherever they are.

    launcher                                        workers
    ┌───────────────────────────┐   start, watch    ┌──────────────────┐
    │ `run_together`            │ ────────────────▶ │ python script.py │ × n
    │ store                     │ ◀──────────────── │   fd.init()      │
    │ prefixes and prints output│   log files       └──────────────────┘
    └───────────────────────────┘

Ends in one of four ways: all workers exit with 0; one fails and the rest are stopped; one holds up
the end for too long; the launcher is told to stop (Ctrl-C, SIGTERM) and stops them all. In every
case no process is left.
What the workers are told is what TorchElastic's agent tells its own.
"""

from __future__ import annotations

import os
import platform
import signal
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from farandole.environment import GRACE
from farandole.errors import LaunchError
from farandole.launch.backends.ssh.agent import Order
from farandole.launch.backends.ssh.start import UNREACHABLE, RemoteWorker, Ssh, exported
from farandole.launch.exit_watch import ExitWatch, Where
from farandole.launch.hosts import HERE
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
from farandole.system.job_processes import IDENTITY
from farandole.system.process_state import is_stopped
from farandole.topology import Topology
from farandole.worker.failure import Failure, Kind, first_cause
from farandole.worker.grace import Grace
from farandole.worker.network import interface_towards
from farandole.worker.signals import signals_noted, warnings_passed_on
from farandole.worker.store.address import StoreAddress
from farandole.worker.store.hosted import LOOPBACK, JobStore

_POLL_SECONDS = 0.05
_COLLECT_SECONDS = 2.0  # a worker that was killed is gone long before its peers are
_FAREWELL_SECONDS = 15.0


def run_together(
    job: Job,
    topology: Topology,
    place: JobDirectory,
    *,
    address: str = LOOPBACK,
    ssh: Ssh | None = None,
    interfaces: Sequence[str] = (),
) -> Outcome:
    """Runs `job` to its end and says how it went. Leaves no process behind, whatever happens.

    The store listens on `address`. Hosts other than `localhost` are reached by `ssh`.
    """
    crew = _Crew(job, topology, place, address, ssh or Ssh(), interfaces)
    relay = Relay(place.sources())
    kept = False
    with signals_noted() as received, warnings_passed_on(crew.send):
        relay.start()
        try:
            place.prepare(received)
            crew.start()
            while crew.is_at_work() and not received:
                time.sleep(_POLL_SECONDS)
                crew.look_after()
            stopped_by = received[0] if crew.is_at_work() else None
            if stopped_by is None:
                crew.find_cause()
            else:
                tell_grace(place, stopped_by, job.grace_seconds)
            crew.stop(received)
            failures = [] if stopped_by else crew.failures()
            if (stop := left_by(failures)) is not None:
                stopped_by, failures = stop, []
            joined = crew.has_joined()
            kept = bool(failures)
        finally:
            crew.stop()
            place.reap()
            relay.stop()
            crew.close()
            place.close(keep_logs=kept)
    if not failures:
        return Outcome(stopped_by=stopped_by, joined=joined)
    failed = tuple(sorted(failure.rank for failure in failures))
    return Outcome(first_cause(failures), failed, logs=place.folder, joined=joined)


class _Crew:
    """The workers of one job, wherever they are."""

    def __init__(
        self,
        job: Job,
        topology: Topology,
        place: JobDirectory,
        address: str,
        ssh: Ssh,
        interfaces: Sequence[str],
    ) -> None:
        self._job = job
        self._topology = topology
        self._place = place
        self._ssh = ssh
        self._address = address
        self._interfaces = interfaces
        self._store = JobStore(place.folder, address)
        self._here: dict[int, Process] = {}
        self._there: dict[int, RemoteWorker] = {}
        self._exits = ExitWatch(job.exit_seconds)
        self._stalls = StallWatch(place.folder, job.stall_seconds, kill=job.stall_kill)
        self._held_up: dict[int, str] = {}  # who did so to the others, and how
        self._told_ns: dict[int, int] = {}  # whom we have told to stop, and when

    def start(self) -> None:
        for host in self._topology.hosts:
            for rank in host.ranks:
                if host.name == HERE:
                    self._start_here(rank)
                else:
                    self._start_there(rank, host.name)

    def is_at_work(self) -> bool:
        """As long as nobody has failed or holds up the end, and somebody works."""
        codes = self._codes().values()
        return None in codes and not any(codes) and not self._held_up

    def look_after(self) -> None:
        """Notes who holds up the job, or its end, for too long."""
        codes = self._codes()
        done = next((rank for rank, code in codes.items() if code == 0), None)
        running = {rank: self._where(rank) for rank, code in codes.items() if code is None}
        self._held_up.update(self._exits.look(running, done))
        self._held_up.update(self._stalls.look({r: w for r, w in running.items() if w.pid}))

    def find_cause(self) -> None:
        """Looks among those that still run for the one that the others failed because of.

        A peer's failure may be seen before the end of the rank that it follows from: as long as
        there are only such failures, that rank is given a moment to end.
        """
        if any(self._codes().values()):
            self._note_stopped()
        deadline = time.monotonic() + _COLLECT_SECONDS
        while self._have_only_followed() and not self._held_up and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)

    def _have_only_followed(self) -> bool:
        codes = self._codes()
        failures = [self._place.failure(rank, code, 0) for rank, code in codes.items() if code]
        followed = [failure.kind is Kind.FOLLOWED for failure in failures]
        return None in codes.values() and bool(followed) and all(followed)

    def _note_stopped(self) -> None:
        for rank, process in self._here.items():
            if rank not in self._held_up and process.poll() is None and is_stopped(process.pid):
                self._held_up[rank] = "was stopped (SIGSTOP), and did not answer the others"
                tell(f"rank {rank} ({self._where(rank)}) is stopped (SIGSTOP), and is ended")

    def _where(self, rank: int) -> Where:
        if rank in self._there:
            return Where(None, self._there[rank].host)
        return Where(self._here[rank].pid, platform.node() or HERE)

    def close(self) -> None:
        self._store.close()

    def has_joined(self) -> bool:
        """Whether any worker took part: by our own calls, or else by torch's, in the store."""
        return self._place.has_joined() or self._store.key_count() > 0

    def failures(self) -> list[Failure]:
        """Of all that ended badly, also because they were told to."""
        now = int(time.time())
        failures = []
        for rank, code in self._codes().items():
            if rank in self._held_up:
                failure = self._place.failure(rank, code or 0, now)
                failures.append(failure.held_up_others(self._held_up[rank]))
            elif code:
                lost = code == UNREACHABLE and rank in self._there
                failure = self._lost(rank, now) if lost else self._place.failure(rank, code, now)
                told_ns = self._told_ns.get(rank)
                failures.append(failure if told_ns is None else failure.told_to_stop(told_ns))
        return failures

    def _lost(self, rank: int, now: int) -> Failure:
        """ssh has failed, or the worker ended in the same way; what is known is the host."""
        failure = self._place.failure(rank, UNREACHABLE, now)
        host = self._there[rank].host
        advice = f"host {host} cannot be reached by ssh, or was lost: try `ssh {host}`"
        error = f"{failure.error}\n{advice}".strip()
        return replace(failure, error=error)

    def send(self, number: signal.Signals) -> None:
        """A signal to every worker; only SIGUSR1 reaches those on other hosts."""
        for process in self._here.values():
            send_to(process, number)
        for worker in self._there.values():
            worker.warn()

    def stop(self, received: Sequence[str] = ()) -> None:
        """Asks all to end, waits until they have, and gives up those that do not.

        Does not wait any longer when one more signal is `received`.
        """
        for rank, code in self._codes().items():
            if code is None:
                self._told_ns.setdefault(rank, time.time_ns())
        for worker in self._there.values():
            worker.stop()
        stop_processes(self._here.values(), Grace(self._job.grace_seconds, received))
        # An attendant first gives its worker time.
        farewell = Grace(self._job.grace_seconds + _FAREWELL_SECONDS, received)
        while self._there and None in self._codes().values() and not farewell.is_over():
            time.sleep(_POLL_SECONDS)
        for worker in self._there.values():
            if worker.poll() is None:
                worker.kill()
        kill_processes(self._here.values())

    def _codes(self) -> dict[int, int | None]:
        return {rank: worker.poll() for rank, worker in (self._here | self._there).items()}

    def _start_here(self, rank: int) -> None:
        command = [self._job.program, *self._job.command]
        variables = self._variables(rank, self._store.here()) | self._stalls.expect(rank)
        if self._address != LOOPBACK:
            interface = interface_towards(self._address)
            if "GLOO_SOCKET_IFNAME" not in {**os.environ, **variables} and interface is not None:
                variables["GLOO_SOCKET_IFNAME"] = interface
        try:
            self._here[rank] = start_process(self._place, rank, command, variables)
        except OSError as error:
            raise LaunchError(
                f"cannot start worker {rank} of {self._job.workers}: {error}. Start fewer, or "
                "ask `farandole doctor` for this machine's limits."
            ) from error

    def _start_there(self, rank: int, host: str) -> None:
        variables = {
            **exported(),
            **self._variables(rank, self._store.elsewhere()),
            **self._job.environment,
            **(self._job.per_rank[rank] if self._job.per_rank else {}),
            IDENTITY: self._place.identity,
            GRACE: f"{self._job.grace_seconds:g}",
        }
        command = (self._job.program, *self._job.command)
        order = Order(
            command,
            str(Path.cwd()),
            variables,
            self._place.in_one_file,
            self._job.grace_seconds,
        )
        self._there[rank] = RemoteWorker(
            host,
            self._ssh,
            order,
            self._place.stdout_file(rank),
            self._place.stderr_file(rank),
            self._place.error_file(rank),
        )

    def _variables(self, rank: int, store: StoreAddress) -> dict[str, str]:
        chosen = dict.fromkeys(
            ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), ",".join(self._interfaces)
        )
        return {
            **(chosen if self._interfaces else {}),
            **seat_variables(
                self._topology,
                rank,
                address=self._address,
                port=self._store.port,
                store=store,
                identity=self._place.identity,
            ),
        }
