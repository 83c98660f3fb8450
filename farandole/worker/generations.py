"""Joins one generation of an elastic job after another, and connects to those who are part of it.

A worker that is started when the job runs already is promised a rank, so that the script can do all
that comes before its training: the others do not wait for that. It gets a rank when it is ready.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import MutableMapping
from dataclasses import dataclass
from datetime import timedelta

from torch.distributed import PrefixStore, Store

from farandole.comm import Exchange, InProcess, Transport
from farandole.environment import ELASTIC_WORKER
from farandole.errors import JoinError
from farandole.worker import elastic
from farandole.worker.carriers import carrier
from farandole.worker.environment import RankAssignment
from farandole.worker.loopback import stay_on_loopback
from farandole.worker.rendezvous import find_store, require_all_ranks

_SLICE = timedelta(seconds=0.5)
_CONNECTING = timedelta(seconds=20)


@dataclass(frozen=True)
class Joined:
    """A generation that this worker is part of. `transport` is None if it is only promised."""

    assignment: RankAssignment
    members: tuple[int, ...]  # the workers, by rank
    admits: bool  # some of them are new, and get the state from the others
    life: int  # how often the job has begun from nothing before
    transport: Transport | None


class Generations:
    """One worker's way through them."""

    def __init__(
        self, timeout: timedelta, transport: str, environ: MutableMapping[str, str] = os.environ
    ) -> None:
        self.worker = int(environ[ELASTIC_WORKER])
        self.generation = -1
        self._questions = 0
        self._timeout = timeout
        self._wanted = transport
        self._environ = environ
        self._store: Store | None = None

    def first(self) -> Joined:
        """The generation that this worker begins with; promised, if the others have begun."""
        found = self.join(elastic.WITHOUT_STATE)
        if found.transport is not None:
            elastic.note_state(self._environ)
        return found

    def join(self, kind: str, step: int = 0) -> Joined:
        """Waits for the next one, as long as the launcher lives. `kind` says what this worker has.

        One that breaks before all have come is left for the one after it: interrupted workers
        stay that, and others are interrupted by it. Raises `LauncherLostError`.
        """
        while True:
            # By a number, because a worker may ask twice about one generation: it was promised a
            # rank there, and now it is ready.
            found = elastic.ask_launcher(self._environ, self._questions, kind, self._timeout, step)
            self._questions += 1
            self.generation = found["generation"]
            assignment = elastic.assignment_of(self._environ, found)
            try:
                transport = None if found.get("is_promise") else self._connect(assignment)
            except elastic.LauncherLostError:
                raise
            except JoinError:
                if kind == elastic.WITH_STATE:
                    kind = elastic.BROKEN
                continue
            return Joined(
                assignment, tuple(found["members"]), found["admits"], found["life"], transport
            )

    def has_state(self) -> None:
        """This worker has got it, and others may get it from here."""
        elastic.note_state(self._environ)

    def _connect(self, assignment: RankAssignment) -> Transport:
        if assignment.size == 1:
            return InProcess(Exchange(1, self._timeout), 0)
        if assignment.one_host:
            stay_on_loopback()
        if self._store is None:
            self._store = find_store(assignment, self._timeout)
        store = PrefixStore(f"generation/{assignment.attempt}", self._store)
        self._wait_for_all(PrefixStore("arrived", store), assignment)
        # All have arrived: this takes a moment, unless one is lost meanwhile.
        connecting = min(self._timeout, _CONNECTING)
        return carrier(assignment, store, self._timeout, self._wanted, connecting)

    def _wait_for_all(self, store: Store, assignment: RankAssignment) -> None:
        """Raises `JoinError` when one of them is lost, or does not come in time."""
        deadline = time.monotonic() + self._timeout.total_seconds()
        news = elastic.elastic_store(self._environ, self._timeout)
        while time.monotonic() < deadline - _SLICE.total_seconds():
            with contextlib.suppress(JoinError):
                require_all_ranks(store, assignment, _SLICE)
                return
            if news.check([elastic.lost_key(assignment.attempt)]):
                raise JoinError(f"a worker of generation {assignment.attempt} was lost")
        require_all_ranks(store, assignment, _SLICE)
