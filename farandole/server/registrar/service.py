"""The registrar at its desk: takes in who comes, who beats and who is silent, and sends out views.

A thread of the process that started the servers. If that process dies, so do the servers.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import zmq

from farandole.server.protocol.control import ControlSocket
from farandole.server.protocol.payload import Malformed
from farandole.server.protocol.views import Reshaped
from farandole.server.registrar.copies import Confirmations
from farandole.server.registrar.meetings import Meetings
from farandole.server.registrar.messages import check_sender, kind_of
from farandole.server.registrar.registrar import Registrar

_TICK_SECONDS = 0.05
_KEPT_LINES = 1000


@dataclass
class _Visitor:
    """A server or a client."""

    peer: bytes
    role: str  # "server", "worker", "guest", or "late": a worker that does not count yet
    number: int
    rank: int = -1
    mark: str = ""  # by which whoever started a server knows it again
    since: float = field(default_factory=time.monotonic)
    heard: float = field(default_factory=time.monotonic)
    facts: dict[str, Any] = field(default_factory=dict)  # what a server says of itself


class RegistrarService:
    """`workers` are waited for before any of them begins; 0: each begins when it comes."""

    def __init__(
        self,
        registrar: Registrar,
        key: bytes,
        *,
        bind: str = "tcp://127.0.0.1:*",
        workers: int = 0,
        server_patience: float = 3.0,
        worker_patience: float = 20.0,
    ) -> None:
        self._registrar = registrar
        self._counter = ControlSocket(key, bind)
        self.address = self._counter.address
        self._patience = {
            "server": server_patience,
            "worker": worker_patience,
            "late": worker_patience,
        }
        self._visitors: dict[bytes, _Visitor] = {}
        self._early: dict[int, bytes] = {}  # by rank: workers who wait until all are there
        self._expected: set[int] = set(range(workers))
        self._meetings = Meetings()
        self._confirmations = Confirmations()
        self._mark = ""
        self._job = ""
        self._dead: set[int] = set()  # ranks, perhaps before they were heard of
        self._sent_view = 0
        self._looked = time.monotonic()
        self._errands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._lines: list[str] = []
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._work, name="registrar", daemon=True)
        self._thread.start()

    # From other threads

    def lose_server(self, mark: str) -> None:
        """Its process is known to be dead; no need to wait for its silence."""
        self._errands.put(lambda: self._lose_server(mark))

    def lose_worker(self, rank: int) -> None:
        now = time.monotonic()
        self._errands.put(lambda: self._lose_rank(rank, now))

    def expect_worker(self, rank: int) -> None:
        """It was started again and will come."""
        self._errands.put(lambda: self._dead.discard(rank))

    def take_lines(self) -> list[str]:
        """What has happened since the last call, for people."""
        lines, self._lines = self._lines, []
        return lines

    @property
    def loss(self) -> str:
        """Why ranges are lost; empty if none are."""
        return self._registrar.view.lost_because

    @property
    def is_settled(self) -> bool:
        """As far as the registrar knows; `missing_copies` asks the servers."""
        return self._registrar.is_settled

    def missing_copies(self, seconds: float, is_pointless: Callable[[], bool]) -> int:
        """Asks all servers what they hold. One that does not answer in time holds nothing."""
        question = self._confirmations.begin()
        self._errands.put(lambda: self._ask_servers(question))
        confirmed = self._confirmations.wait(
            lambda: self._registrar.view.addresses, seconds, is_pointless
        )
        return self._registrar.missing_copies(confirmed)

    def facts(self) -> dict[int, dict[str, Any]]:
        """What each server last said of itself: bytes held, updates, drops."""
        return {v.number: v.facts for v in list(self._visitors.values()) if v.role == "server"}

    def close(self) -> None:
        self._stopped.set()
        self._thread.join()
        self._counter.close()

    # The thread

    def _work(self) -> None:
        poller = zmq.Poller()
        poller.register(self._counter.socket, zmq.POLLIN)
        while not self._stopped.is_set():
            poller.poll(int(_TICK_SECONDS * 1000))
            while (said := self._counter.receive()) is not None:
                try:
                    self._hear(*said)
                except Malformed as error:
                    self._say(f"the registrar drops {str(said[1])[:200]}: {error}")
            while not self._errands.empty():
                self._errands.get()()
            self._miss_the_silent()
            self._send_out()
        for visitor in self._visitors.values():
            self._counter.send(visitor.peer, {"closed": True})

    def _hear(self, peer: bytes, message: dict[str, Any], payload: bytes) -> None:
        visitor = self._visitors.get(peer)
        kind = kind_of(message)
        if kind == "hello":
            self._welcome(peer, message)
        elif visitor is None and kind == "bye":  # before all were there
            self._early = {rank: other for rank, other in self._early.items() if other != peer}
        elif visitor is None:
            self._counter.send(peer, {"unknown": True})  # it was given up
        else:
            check_sender(kind, visitor.role)
            visitor.heard = time.monotonic()
            self._hear_visitor(visitor, kind, message, payload)

    def _hear_visitor(
        self, visitor: _Visitor, kind: str, message: dict[str, Any], payload: bytes
    ) -> None:
        said = message[kind]
        if kind == "facts":
            visitor.facts = said
            self._counter.send(visitor.peer, {"beat": True})
        elif kind == "confirmed":
            self._confirmations.take(said, visitor.number, dict(message["held"]))
        elif kind == "reshaped":
            self._registrar.take_reshaped(visitor.number, Reshaped(*said))
        elif kind == "meet":
            over = self._meetings.give(said, visitor.rank, payload)
            if over is not None:
                self._tell_outcome(visitor, said, over)
            self._end_meetings()
        elif kind == "missing":
            ranks = self._meetings.missing(said, self._ranks())
            self._counter.send(visitor.peer, {"missing": said, "ranks": ranks})
        elif kind == "mark":
            self._take_mark(said)
        elif kind == "enter":
            visitor.role = "worker"
            self._registrar.admit(visitor.number)
        elif kind == "bye":
            self._part_with(visitor, lost=False)

    def _welcome(self, peer: bytes, message: dict[str, Any]) -> None:
        if peer in self._visitors:
            return  # said twice
        role = message["hello"]
        if role == "server":
            number = self._registrar.add_server(message["address"])
            self._admit(_Visitor(peer, role, number, mark=str(message.get("mark", ""))))
        elif role == "guest":
            self._admit(_Visitor(peer, role, self._registrar.add_guest()))
        elif role == "worker":
            rank = int(message["rank"])
            if not self._is_of_this_job(peer, message):
                return
            if message.get("late"):
                self._admit(_Visitor(peer, "late", self._registrar.add_guest(), rank))
                self._counter.send(peer, {"mark": self._mark})
                self._tell_the_late()
            elif rank in self._expected:
                self._early[rank] = peer
                if self._early.keys() >= self._expected:
                    self._begin()
            else:
                self._begin_one(rank, peer)

    def _is_of_this_job(self, peer: bytes, message: dict[str, Any]) -> bool:
        """Servers that outlive a job serve the next one when the one before has left."""
        job = str(message.get("job", ""))
        if job == self._job:
            return True
        if self._ranks() or self._early:
            why = (
                f"at work for another job of {len(self._ranks())} workers. Wait for its end, or "
                "start others with `farandole server`."
            )
            self._counter.send(peer, {"busy": why})
            return False
        self._job, self._mark, self._meetings = job, "", Meetings()
        self._expected = set(range(int(message.get("of", 0)))) - self._dead
        return True

    def _begin(self) -> None:
        """All that were expected are here, or dead."""
        early, self._early, self._expected = self._early, {}, set()
        for rank, peer in sorted(early.items()):
            self._begin_one(rank, peer)

    def _begin_one(self, rank: int, peer: bytes) -> None:
        self._admit(_Visitor(peer, "worker", self._registrar.add_worker(), rank))

    def _admit(self, visitor: _Visitor) -> None:
        self._visitors[visitor.peer] = visitor
        self._counter.send(visitor.peer, {"you": visitor.number})
        if self._sent_view:
            self._send_view(visitor.peer)

    def _ranks(self) -> list[int]:
        return [visitor.rank for visitor in self._visitors.values() if visitor.role == "worker"]

    def _tell_the_late(self) -> None:
        """When all who were at work have left, there is nothing to enter any more."""
        if not self._ranks() and not self._expected:
            for visitor in self._visitors.values():
                if visitor.role == "late":
                    self._counter.send(visitor.peer, {"finished": True})

    def _end_meetings(self) -> None:
        """Of those who are at work; when they have all left, of whoever is there."""
        ranks = self._ranks()
        for name, given in self._meetings.complete(ranks) if not self._expected else []:
            for visitor in self._visitors.values():
                if visitor.rank in given:
                    self._tell_outcome(visitor, name, given)

    def _tell_outcome(self, visitor: _Visitor, name: str, given: dict[int, bytes]) -> None:
        present = sorted(given)
        message = {"met": name, "ranks": present, "sizes": [len(given[r]) for r in present]}
        self._counter.send(visitor.peer, message, b"".join(given[rank] for rank in present))

    def _take_mark(self, mark: str) -> None:
        """The job has begun another epoch: those who came late can begin with it."""
        self._mark = mark
        self._meetings.forget_all_but(mark)
        for visitor in self._visitors.values():
            if visitor.role == "late":
                self._counter.send(visitor.peer, {"mark": mark})

    def _miss_the_silent(self) -> None:
        now = time.monotonic()
        # If this process was stopped itself, or got no CPU, that was nobody's silence.
        own_pause = max(0.0, now - self._looked - 2 * _TICK_SECONDS)
        self._looked = now
        for visitor in list(self._visitors.values()):
            visitor.heard = min(now, visitor.heard + own_pause)
            patience = self._patience.get(visitor.role)
            if patience is not None and now - visitor.heard > patience:
                self._say(f"{_name(visitor)} was silent for {patience:g} s and is given up")
                self._counter.send(visitor.peer, {"unknown": True})
                self._part_with(visitor, lost=True)

    def _ask_servers(self, question: int) -> None:
        for visitor in self._visitors.values():
            if visitor.role == "server":
                self._counter.send(visitor.peer, {"confirm": question})

    def _lose_server(self, mark: str) -> None:
        for visitor in list(self._visitors.values()):
            if visitor.role == "server" and visitor.mark == mark:
                self._part_with(visitor, lost=True)

    def _lose_rank(self, rank: int, when: float) -> None:
        """Whoever had this rank then: another one may have come since."""
        self._early.pop(rank, None)
        self._expected.discard(rank)
        self._dead.add(rank)
        for visitor in list(self._visitors.values()):
            if visitor.rank == rank and visitor.since < when:
                self._part_with(visitor, lost=True)
        if self._early and self._early.keys() >= self._expected:
            self._begin()

    def _part_with(self, visitor: _Visitor, *, lost: bool) -> None:
        del self._visitors[visitor.peer]
        if visitor.role == "server":
            self._registrar.lose_server(visitor.number)
        elif visitor.role == "worker":
            self._registrar.remove_worker(visitor.number, lost=lost)
            self._end_meetings()
            self._tell_the_late()

    def _say(self, line: str) -> None:
        self._lines = [*self._lines[-_KEPT_LINES:], line]  # whoever reads them may be busy

    def _send_out(self) -> None:
        view = self._registrar.view
        if view.number > self._sent_view and self._registrar.has_begun:
            self._sent_view = view.number
            for visitor in self._visitors.values():
                self._send_view(visitor.peer)
        servers = {v.number: v.peer for v in self._visitors.values() if v.role == "server"}
        orders, self._registrar.orders = self._registrar.orders, []
        for server, order in orders:
            if server in servers:
                said = [order.range, order.epoch, list(order.servers)]
                self._counter.send(servers[server], {"reshape": said})

    def _send_view(self, peer: bytes) -> None:
        self._counter.send(peer, {"view": self._registrar.view.to_json()})


def _name(visitor: _Visitor) -> str:
    return f"server {visitor.number}" if visitor.role == "server" else f"rank {visitor.rank}"
