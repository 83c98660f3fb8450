"""The registrar's service: tracks servers and workers by heartbeat, and sends out views.

A thread of the process that started the servers. If that process dies, so do the servers.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import zmq

from farandole.server.protocol.control import ControlSocket
from farandole.server.protocol.payload import Malformed
from farandole.server.protocol.views import Reshaped
from farandole.server.registrar.copies import Confirmations
from farandole.server.registrar.job import ServedJob
from farandole.server.registrar.messages import check_sender, kind_of
from farandole.server.registrar.participants import Participant, Participants
from farandole.server.registrar.registrar import Registrar

_TICK_SECONDS = 0.05
_KEPT_LINES = 1000


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
        self._socket = ControlSocket(key, bind)
        self.address = self._socket.address
        self._patience = {
            "server": server_patience,
            "worker": worker_patience,
            "late": worker_patience,
        }
        self._participants = Participants()
        self._job = ServedJob(registrar, self._socket, self._participants, self._admit, workers)
        self._confirmations = Confirmations()
        self._sent_view = 0
        self._looked = time.monotonic()
        # Other threads change nothing themselves. They put tasks here, and the registrar's thread
        # runs them between two messages: `Registrar` and `ServedJob` need no locks.
        self._tasks: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._lines: list[str] = []
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._work, name="registrar", daemon=True)
        self._thread.start()

    # From other threads

    def lose_server(self, mark: str) -> None:
        """Its process is known to be dead; no need to wait for its silence."""
        self._tasks.put(lambda: self._lose_server(mark))

    def lose_worker(self, rank: int) -> None:
        now = time.monotonic()
        self._tasks.put(lambda: self._lose_rank(rank, now))

    def expect_worker(self, rank: int) -> None:
        """It was started again and will come."""
        self._tasks.put(lambda: self._job.expect(rank))

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
        self._tasks.put(lambda: self._ask_servers(question))
        confirmed = self._confirmations.wait(
            lambda: self._registrar.view.addresses, seconds, is_pointless
        )
        return self._registrar.missing_copies(confirmed)

    def facts(self) -> dict[int, dict[str, Any]]:
        """What each server last said of itself: bytes held, updates, drops."""
        return {server.number: server.facts for server in self._participants.of_role("server")}

    def close(self) -> None:
        self._stopped.set()
        self._thread.join()
        self._socket.close()

    # The thread

    def _work(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket.socket, zmq.POLLIN)
        while not self._stopped.is_set():
            poller.poll(int(_TICK_SECONDS * 1000))
            while (said := self._socket.receive()) is not None:
                try:
                    self._hear(*said)
                except Malformed as error:
                    self._say(f"the registrar drops {str(said[1])[:200]}: {error}")
            # After the messages: a goodbye that has arrived counts before the report that the
            # process has ended.
            while not self._tasks.empty():
                self._tasks.get()()
            self._miss_the_silent()
            self._send_out()
        for participant in self._participants:
            self._socket.send(participant.peer, {"closed": True})

    def _hear(self, peer: bytes, message: dict[str, Any], payload: bytes) -> None:
        participant = self._participants.get(peer)
        kind = kind_of(message)
        if kind == "hello":
            self._welcome(peer, message)
        elif participant is None and kind == "bye":  # before all were there
            self._job.leave_early(peer)
        elif participant is None:
            self._socket.send(peer, {"unknown": True})  # it was given up
        else:
            check_sender(kind, participant.role)
            participant.heard = time.monotonic()
            self._hear_participant(participant, kind, message, payload)

    def _hear_participant(
        self, participant: Participant, kind: str, message: dict[str, Any], payload: bytes
    ) -> None:
        said = message[kind]
        if kind == "facts":
            participant.facts = said
            self._socket.send(participant.peer, {"beat": True})
        elif kind == "confirmed":
            self._confirmations.take(said, participant.number, dict(message["held"]))
        elif kind == "reshaped":
            self._registrar.take_reshaped(participant.number, Reshaped(*said))
        elif kind == "meet":
            self._job.give(participant, said, payload)
        elif kind == "missing":
            self._job.send_missing(participant, said)
        elif kind == "mark":
            self._job.begin_epoch(said)
        elif kind == "enter":
            self._job.enter(participant)
        elif kind == "bye":
            self._part_with(participant, lost=False)

    def _welcome(self, peer: bytes, message: dict[str, Any]) -> None:
        if self._participants.get(peer) is not None:
            return  # said twice
        role = message["hello"]
        if role == "server":
            number = self._registrar.add_server(message["address"])
            self._admit(Participant(peer, role, number, mark=str(message.get("mark", ""))))
        elif role == "guest":
            self._admit(Participant(peer, role, self._registrar.add_guest()))
        elif role == "worker":
            self._job.join(peer, message)

    def _admit(self, participant: Participant) -> None:
        self._participants.add(participant)
        self._socket.send(participant.peer, {"you": participant.number})
        if self._sent_view:
            self._send_view(participant.peer)

    def _miss_the_silent(self) -> None:
        now = time.monotonic()
        # If this process was stopped itself, or got no CPU, that was nobody's silence.
        own_pause = max(0.0, now - self._looked - 2 * _TICK_SECONDS)
        self._looked = now
        for participant in self._participants:
            participant.heard = min(now, participant.heard + own_pause)
            patience = self._patience.get(participant.role)
            if patience is not None and now - participant.heard > patience:
                self._say(f"{participant.title} was silent for {patience:g} s and is given up")
                self._socket.send(participant.peer, {"unknown": True})
                self._part_with(participant, lost=True)

    def _ask_servers(self, question: int) -> None:
        for server in self._participants.of_role("server"):
            self._socket.send(server.peer, {"confirm": question})

    def _lose_server(self, mark: str) -> None:
        for server in self._participants.of_role("server"):
            if server.mark == mark:
                self._part_with(server, lost=True)

    def _lose_rank(self, rank: int, when: float) -> None:
        """Whoever had this rank then: another one may have come since."""
        self._job.lose(rank)
        for participant in self._participants:
            # `when` was taken when the death was reported. A worker that was started again may have
            # come before this task runs, and must not be lost for its predecessor's death.
            if participant.rank == rank and participant.since < when:
                self._part_with(participant, lost=True)
        self._job.begin_if_complete()

    def _part_with(self, participant: Participant, *, lost: bool) -> None:
        self._participants.remove(participant)
        if participant.role == "server":
            self._registrar.lose_server(participant.number)
        elif participant.role == "worker":
            self._registrar.remove_worker(participant.number, lost=lost)
            self._job.end_meetings()
            self._job.tell_the_late()

    def _say(self, line: str) -> None:
        self._lines = [*self._lines[-_KEPT_LINES:], line]  # whoever reads them may be busy

    def _send_out(self) -> None:
        view = self._registrar.view
        # Views go out before orders: the head must know the chain that an order is about.
        if view.number > self._sent_view and self._registrar.has_begun:
            self._sent_view = view.number
            for participant in self._participants:
                self._send_view(participant.peer)
        servers = {server.number: server.peer for server in self._participants.of_role("server")}
        orders, self._registrar.orders = self._registrar.orders, []
        for server, order in orders:
            if server in servers:
                said = [order.range, order.epoch, list(order.servers)]
                self._socket.send(servers[server], {"reshape": said})

    def _send_view(self, peer: bytes) -> None:
        self._socket.send(peer, {"view": self._registrar.view.to_json()})
