"""Which workers are to be ended because the others wait for them to ask for a rank."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

from farandole.launch.messages import tell
from farandole.launch.policies.elastic.job import ElasticJob
from farandole.launch.policies.elastic.members import ElasticWorker
from farandole.launch.watches.exit_watch import Location, Overdue
from farandole.system.process_state import is_stopped

_STOPPED_SECONDS = 3.0  # that others have waited for a stopped worker, before it is ended
_NAMED_SECONDS = 5.0
_NEW_NAMED_SECONDS = 60.0


class LateWorkers:
    """Measures how long those that ask have waited for the rest of their next generation."""

    def __init__(self, job: ElasticJob) -> None:
        self._job = job
        self._asked_since: float | None = None

    def reset(self) -> None:
        """A generation was formed: nobody waits any more."""
        self._asked_since = None

    def look(
        self,
        awaited: Iterable[ElasticWorker],
        locations: Mapping[int, Location],
        *,
        someone_waits: bool,
    ) -> list[Overdue]:
        """Who of the `awaited`, none of which asks yet, is overdue. Names those who soon will be.

        A worker that had a rank is late when others have waited for it, a new one when it was
        started long ago: it may have much to import.
        """
        now = time.monotonic()
        if not someone_waits:
            self._asked_since = None
        elif self._asked_since is None:
            self._asked_since = now
        waited = 0.0 if self._asked_since is None else now - self._asked_since
        overdue = []
        for worker in awaited:
            limit, late, patience = self._job.start_timeout_seconds, waited, _NAMED_SECONDS
            if worker.rank is not None:
                limit = min(limit, self._job.answer_seconds)
            else:
                late, patience = now - worker.since, _NEW_NAMED_SECONDS
            location = locations[worker.number]
            suspended = location.pid is not None and is_stopped(location.pid)
            if waited > _STOPPED_SECONDS and suspended:
                how = "was stopped (SIGSTOP), and did not ask for its new rank"
                overdue.append(Overdue(worker.number, how))
            elif late > limit:
                how = f"did not ask for its new rank within {limit:g} s"
                overdue.append(Overdue(worker.number, how))
            elif waited > patience and not worker.is_named:
                worker.is_named = True
                tell(
                    f"waiting for worker {worker.number} ({location}, running) to ask for its new "
                    f"rank; it is ended after {limit:g} s"
                )
        return overdue
