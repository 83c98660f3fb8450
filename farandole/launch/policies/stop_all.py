"""The policy of most jobs: all workers start together, and when one fails all are stopped.

The job ends when all workers have exited with 0, when one fails, or when one holds up the others
for too long. Then the policy looks for the cause among all that have ended badly. Only where the
others write what they hold for the next attempt are they given the time to end by themselves.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from farandole.launch.job import Job, Outcome
from farandole.launch.messages import tell
from farandole.launch.policies.base import Policy
from farandole.launch.rank_variables import rank_variables
from farandole.launch.watches.exit_watch import ExitWatch, Overdue
from farandole.launch.worker_pool import WorkerPool
from farandole.system.process_state import is_stopped
from farandole.topology import Topology
from farandole.worker.failure import Failure, Kind, first_cause, signal_obeyed_by

_POLL_SECONDS = 0.05
_COLLECT_SECONDS = 2.0  # a worker that was killed is gone long before its peers are


class StopAll(Policy):
    """All ranks of `topology`, once."""

    def __init__(self, pool: WorkerPool, job: Job, topology: Topology) -> None:
        self.exit_watch = ExitWatch(job.exit_seconds)
        self._pool = pool
        self._topology = topology
        self._codes: dict[int, int] = {}  # of those that have ended
        self._held_up: dict[int, str] = {}  # who did so to the others, and how
        self._grace_seconds = job.grace_seconds
        self._wait_until: float | None = None  # for the others, once one has failed

    def start(self) -> None:
        for host in self._topology.hosts:
            for rank in host.ranks:
                variables = rank_variables(self._topology, rank, self._pool.directory.identity)
                self._pool.start(rank, host.name, len(host.ranks), variables)

    def is_finished(self) -> bool:
        if not self._pool.running:
            return True
        return self._wait_until is not None and time.monotonic() >= self._wait_until

    def on_exits(self, codes: Mapping[int, int]) -> None:
        self._codes.update(codes)
        self.done = min((rank for rank, code in self._codes.items() if code == 0), default=None)
        if any(self._codes.values()):
            self._begin_end()

    def on_overdue(self, workers: Sequence[Overdue]) -> None:
        self._held_up.update(workers)
        self._begin_end()

    def _begin_end(self) -> None:
        """Others that hold a lost worker's state too need time to write it, and then end."""
        if self._wait_until is not None:
            return
        report = self._pool.report()
        leaves = report is not None and report.leaves_state
        self._wait_until = time.monotonic() + (self._grace_seconds if leaves else 0.0)
        if leaves:
            self._note_suspended()
            for rank in self._held_up.keys() & self._pool.running.keys():
                self._pool.kill(rank)  # the others wait for it

    def settle(self) -> None:
        """Looks among those that still run for the one that the others failed because of.

        A peer's failure may be seen before the end of the rank that it follows from: as long as
        there are only such failures, that rank is given a moment to end.
        """
        if any(self._codes.values()):
            # Before anybody is told to stop: `stop_workers` kills suspended processes, and then it
            # could not be seen any more who held up the others.
            self._note_suspended()
        deadline = time.monotonic() + _COLLECT_SECONDS
        while self._have_only_followed() and not self._held_up and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
            self.on_exits(self._pool.collect())

    def outcome(self, stopped_by: str | None) -> Outcome:
        self.on_exits(self._pool.collect())  # those that were stopped
        failures = [] if stopped_by else self._failures()
        obeyed = signal_obeyed_by(failures)
        if obeyed is not None or not failures:
            return Outcome(stopped_by=obeyed or stopped_by)
        failed = tuple(sorted(failure.rank for failure in failures))
        return Outcome(first_cause(failures), failed)

    def _have_only_followed(self) -> bool:
        failures = [self._pool.failure(rank, code, 0) for rank, code in self._codes.items() if code]
        followed = [failure.kind is Kind.FOLLOWED for failure in failures]
        return bool(self._pool.running) and bool(followed) and all(followed)

    def _note_suspended(self) -> None:
        for rank, location in self._pool.locations().items():
            if rank not in self._held_up and location.pid is not None and is_stopped(location.pid):
                self._held_up[rank] = "was stopped (SIGSTOP), and did not answer the others"
                tell(f"rank {rank} ({location}) is stopped (SIGSTOP), and is ended")

    def _failures(self) -> list[Failure]:
        """Of all that ended badly, also because they were told to."""
        now = int(time.time())
        failures = []
        for rank in range(self._topology.size):
            code = self._codes.get(rank, 0)
            if rank in self._held_up:
                failure = self._pool.failure(rank, code, now)
                failures.append(failure.held_up_others(self._held_up[rank]))
            elif code:
                failure = self._pool.failure(rank, code, now)
                told_ns = self._pool.told_to_stop_ns.get(rank)
                failures.append(failure if told_ns is None else failure.told_to_stop(told_ns))
        return failures
