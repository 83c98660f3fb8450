"""The job that the servers work for now: which workers it waits for, and their meetings.

Its workers begin together: when all that are expected have come, or are known to be dead. One that
is started again comes late. It does not count until it enters, at the beginning of an epoch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from farandole.server.protocol.control import ControlSocket
from farandole.server.registrar.meetings import Meetings
from farandole.server.registrar.participants import Participant, Participants
from farandole.server.registrar.registrar import Registrar


class ServedJob:
    """`workers` are waited for before any of them begins; 0: each begins when it comes."""

    def __init__(
        self,
        registrar: Registrar,
        socket: ControlSocket,
        participants: Participants,
        admit: Callable[[Participant], None],
        workers: int,
    ) -> None:
        self._registrar = registrar
        self._socket = socket
        self._participants = participants
        self._admit = admit
        self._name = ""
        self._meetings = Meetings()
        self._expected: set[int] = set(range(workers))
        self._early: dict[int, bytes] = {}  # by rank: workers who wait until all are there
        self._dead: set[int] = set()  # ranks, perhaps before they were heard of

    # Who takes part

    def join(self, peer: bytes, message: dict[str, Any]) -> None:
        """A worker has come."""
        rank = int(message["rank"])
        if not self._is_for(peer, message):
            return
        if message.get("late"):
            # A guest at first: were it a member, all others would wait for its clock while it reads
            # the data that they have trained on without it.
            self._admit(Participant(peer, "late", self._registrar.add_guest(), rank))
            self.tell_the_late()
        elif rank in self._expected:
            self._early[rank] = peer
            self.begin_if_complete()
        else:
            self._begin_one(rank, peer)

    def _is_for(self, peer: bytes, message: dict[str, Any]) -> bool:
        """Servers that outlive a job serve the next one when the one before has left."""
        job = str(message.get("job", ""))
        if job == self._name:
            return True
        ranks = self._participants.ranks
        if ranks or self._early:
            why = (
                f"at work for another job of {len(ranks)} workers. Wait for its end, or "
                "start others with `farandole server`."
            )
            self._socket.send(peer, {"busy": why})
            return False
        self._name, self._meetings = job, Meetings()
        self._expected = set(range(int(message.get("of", 0)))) - self._dead
        return True

    def begin_if_complete(self) -> None:
        """When all that were expected are here, or dead."""
        # Together, so that all have the same members from the first clock on. A worker that began
        # alone would be the slowest and the fastest at once, and would wait for nobody.
        if self._early and self._early.keys() >= self._expected:
            early, self._early, self._expected = self._early, {}, set()
            for rank, peer in sorted(early.items()):
                self._begin_one(rank, peer)

    def _begin_one(self, rank: int, peer: bytes) -> None:
        self._admit(Participant(peer, "worker", self._registrar.add_worker(), rank))

    def enter(self, late: Participant) -> None:
        """One that came late counts from the beginning of the next epoch."""
        late.waits_to_enter = late.role == "late"

    def leave_early(self, peer: bytes) -> None:
        """One that waited for the others to come has gone."""
        self._early = {rank: other for rank, other in self._early.items() if other != peer}

    def lose(self, rank: int) -> None:
        """Nobody waits for this rank any more."""
        self._early.pop(rank, None)
        self._expected.discard(rank)
        self._dead.add(rank)

    def expect(self, rank: int) -> None:
        """It was started again and will come."""
        self._dead.discard(rank)

    def tell_the_late(self) -> None:
        """When all who were at work have left, there is nothing to enter any more."""
        if not self._participants.ranks and not self._expected:
            for late in self._participants.of_role("late"):
                self._socket.send(late.peer, {"finished": True})

    # Meetings

    def give(self, worker: Participant, meeting: str, payload: bytes) -> None:
        """The worker's contribution. Whoever comes again, or late, gets what there was."""
        over = self._meetings.give(meeting, worker.rank, payload)
        if over is not None:
            self._send_outcome(worker, meeting, over)
        self.end_meetings()

    def end_meetings(self) -> None:
        """Of those who are at work; when they have all left, of whoever is there."""
        # While workers are still to come, those who are here must not meet without them.
        if self._expected:
            return
        for name, given in self._meetings.complete(self._participants.ranks):
            for participant in self._participants:
                if participant.rank in given:
                    self._send_outcome(participant, name, given)

    def _send_outcome(self, worker: Participant, name: str, given: dict[int, bytes]) -> None:
        present = sorted(given)
        message = {"met": name, "ranks": present, "sizes": [len(given[r]) for r in present]}
        self._socket.send(worker.peer, message, b"".join(given[rank] for rank in present))

    def send_missing(self, worker: Participant, meeting: str) -> None:
        """Who has not come to the meeting."""
        ranks = self._meetings.missing(meeting, self._participants.ranks)
        self._socket.send(worker.peer, {"missing": meeting, "ranks": ranks})

    def begin_epoch(self, mark: str) -> None:
        """Another epoch has begun: those who came late, and are ready, begin with it."""
        self._meetings.forget_all_but(mark)
        for late in self._participants.of_role("late"):
            if late.waits_to_enter:
                # Here, not when it answers: the others may be in the first meeting of the epoch by
                # then, and it would end without this one.
                late.role, late.waits_to_enter = "worker", False
                self._registrar.admit(late.number)
                self._socket.send(late.peer, {"entered": mark})
