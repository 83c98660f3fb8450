"""The policy under parameter servers: the others go on without a worker that failed.

Stopping all workers when one fails is right where every rank waits for every other. Under a
parameter server none does. So the policy decides for each worker that ends:

    rank 0, with 0                its part is done; the job is when no other worker runs
    rank 0, in any other way      the job has failed: rank 0 writes logs and checkpoints
    another, with 0               it is done
    another, in any other way     it is started again while it has restarts, or else lost
    one that is stopped (SIGSTOP) the servers give it up; it is then ended, and has failed
    the others, when one is done  they have so long to end as `exit_watch` says
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from farandole.launch.job import Job, Outcome
from farandole.launch.messages import tell
from farandole.launch.policies.base import Policy
from farandole.launch.rank_variables import rank_variables
from farandole.launch.watches.exit_watch import ExitWatch, Overdue
from farandole.launch.worker_pool import WorkerPool
from farandole.topology import Topology
from farandole.worker.failure import Failure, signal_obeyed_by

_STOPPED_SECONDS = 25.0  # somewhat later than the servers give a silent worker up


class Tolerant(Policy):
    """All ranks of `topology`, each up to `job.restarts` times again.

    `on_lost` is called with the rank of each worker that ended badly, then `on_restart` just
    before it is started again, if it is. `check` is called at each tick, and returns lines to
    print; what it raises ends the job.
    """

    def __init__(
        self,
        pool: WorkerPool,
        job: Job,
        topology: Topology,
        *,
        on_lost: Callable[[int], None] | None = None,
        on_restart: Callable[[int], None] | None = None,
        check: Callable[[], Sequence[str] | None] | None = None,
    ) -> None:
        self.exit_watch = ExitWatch(job.exit_seconds, stopped_seconds=_STOPPED_SECONDS)
        self._pool = pool
        self._topology = topology
        self._most_restarts = job.restarts
        self._on_lost = on_lost
        self._on_restart = on_restart
        self._check = check
        self._failure: Failure | None = None  # rank 0's
        self._lost: list[int] = []
        self._restarts = [0] * topology.size

    def start(self) -> None:
        for rank in range(self._topology.size):
            self._start(rank)

    def is_finished(self) -> bool:
        return self._failure is not None or not self._pool.running

    def on_exits(self, codes: Mapping[int, int]) -> None:
        if self.done is None:
            self.done = next((rank for rank, code in codes.items() if code == 0), None)
        now = int(time.time())
        self._handle(
            {rank: self._pool.failure(rank, code, now) for rank, code in codes.items() if code}
        )

    def on_overdue(self, workers: Sequence[Overdue]) -> None:
        failures = {}
        for rank, how in workers:
            code = self._pool.end(rank)
            failure = self._pool.failure(rank, code, int(time.time()))
            failures[rank] = failure.held_up_others(how)
        self._handle(failures)

    def tick(self) -> None:
        for line in (self._check() if self._check else None) or ():
            tell(line)

    def outcome(self, stopped_by: str | None) -> Outcome:
        lost = tuple(sorted(self._lost))
        if self._failure is None:
            return Outcome(stopped_by=stopped_by, lost=lost)
        obeyed = signal_obeyed_by([self._failure])
        if obeyed is not None:
            return Outcome(stopped_by=obeyed, lost=lost)
        return Outcome(self._failure, (0,), lost=lost)

    def _handle(self, failures: dict[int, Failure]) -> None:
        """Rank 0's first: when it has failed, nobody is started again."""
        self._failure = failures.pop(0, None)
        for rank, failure in failures.items():
            self._lose(rank, failure)

    def _lose(self, rank: int, failure: Failure) -> None:
        again = 0 in self._pool.running and self._restarts[rank] < self._most_restarts
        again = again and signal_obeyed_by([failure]) is None  # rank 0 is about to leave, too
        if again:
            self._restarts[rank] += 1
            rest = f"; it is started again ({self._restarts[rank]} of {self._most_restarts})"
        else:
            self._lost.append(rank)
            goes_on = {0: "", 1: "; the other goes on"}
            rest = goes_on.get(len(self._pool.running), "; the others go on")
        tell(f"{failure}{rest if self._failure is None else ''}")
        self._pool.kill_children(rank)
        # The servers give up the old process before the new one starts. The other way round, the
        # newcomer could be taken for the one that died.
        if self._on_lost is not None:
            self._on_lost(rank)
        if again:
            if self._on_restart is not None:
                self._on_restart(rank)
            self._start(rank)

    def _start(self, rank: int) -> None:
        variables = {
            **rank_variables(self._topology, rank, self._pool.directory.identity),
            "TORCHELASTIC_RESTART_COUNT": str(self._restarts[rank]),
            "TORCHELASTIC_MAX_RESTARTS": str(self._most_restarts),
        }
        host = self._topology.host(rank)
        self._pool.start(rank, host.name, len(host.ranks), variables)
