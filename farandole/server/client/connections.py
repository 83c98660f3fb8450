"""A client's connections: a line to each server, the requests that are pending, and views.

There is no thread here. Bytes are sent and received by zmq's own threads while the script computes;
what has come is taken in whenever the script asks or waits for something.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import zmq

from farandole.errors import CommError
from farandole.server.channels import Line
from farandole.server.client.pending import Answer, PendingRequests
from farandole.server.client.registrar_client import RegistrarClient
from farandole.server.client.simulated_link import LinkToServers
from farandole.server.protocol.arena import Arena
from farandole.server.protocol.messages import Command, Message, Read
from farandole.server.protocol.process import keep_freed_memory
from farandole.system.activity import NO_ACTIVITY, Activity

_POLL_SECONDS = 0.05
_PATIENCE_SECONDS = 2.0  # without any answer, before everything open is sent again


class Connections:
    """Asks, and waits for answers. For one thread."""

    def __init__(
        self,
        context: zmq.Context[Any],
        key: bytes,
        registrar_client: RegistrarClient,
        number: int,
        arena: Arena | None,
        timeout: float,
        link: LinkToServers | None = None,
    ) -> None:
        self.timeout = timeout
        self._link = link
        self.bytes_sent = 0
        self.bytes_received = 0
        self.waited_seconds = 0.0
        self.activity: Activity = NO_ACTIVITY  # hears of waits
        self._context = context
        self._key = key
        self._registrar_client = registrar_client
        self._arena = arena
        self._pending = PendingRequests(number)
        self._lines: dict[int, Line] = {}
        self._saved_before = 0  # by lines that are closed
        self._poller = zmq.Poller()
        self._heard = time.monotonic()
        self._take_view()

    @property
    def members(self) -> tuple[int, ...]:
        return self._pending.view.members

    @property
    def ranges(self) -> int:
        return len(self._pending.view.chains)

    @property
    def saved_key_bytes(self) -> int:
        """Of lists of rows that the servers knew already."""
        return self._saved_before + sum(line.keys.saved_bytes for line in self._lines.values())

    def ask(self, messages: Iterable[Command | Read]) -> list[int]:
        """Sends them; returns the tickets of their answers."""
        tickets = [self._pending.ask(message) for message in messages]
        self._send_out()
        return tickets

    def answered(self, tickets: Iterable[int]) -> bool:
        """Whether all have an answer. Takes in what has come; does not wait."""
        self._progress(0)
        return all(ticket in self._pending.answers for ticket in tickets)

    def wait(self, tickets: Iterable[int]) -> list[Answer]:
        """The answers, when all are there. Raises `CommError` naming those that did not answer."""
        left = {ticket for ticket in tickets if ticket not in self._pending.answers}
        began = time.monotonic()
        self.activity.begin_wait()
        try:
            while left:
                self._progress(_POLL_SECONDS)
                left = {ticket for ticket in left if ticket not in self._pending.answers}
                if left:
                    self._check(began)
        finally:
            self.activity.end_wait()
        self.waited_seconds += time.monotonic() - began
        return [self._pending.answers.pop(ticket) for ticket in tickets]

    def forget(self, tickets: Iterable[int]) -> None:
        for ticket in tickets:
            self._pending.forget(ticket)

    def _progress(self, seconds: float) -> None:
        self._take_view()
        if self._lines:
            # One poll for all lines; what has come is then taken from each without waiting.
            self._poller.poll(int(self._patience(seconds) * 1000))
        else:
            time.sleep(seconds)
        for number, line in list(self._lines.items()):
            before = line.sessions
            messages = line.receive()
            for message in messages:
                self.bytes_received += _nbytes(message)
                if self._link is None:
                    self._pending.receive(number, message)
                else:
                    self._link.hold(number, message, _nbytes(message))
            if messages:
                self._heard = time.monotonic()
            if line.sessions > before and line.unshared:
                keep_freed_memory()  # all that is read comes in frames
            # The first Welcome of a line loses nothing: `Line` keeps what it is given until then.
            # Each later one means that the server has forgotten the connection, and with it what
            # was under way.
            if line.sessions > max(before, 1):
                self._pending.send_again(number)
        if self._link is not None:
            for number, message in self._link.due():
                self._pending.receive(number, message)
        now = time.monotonic()
        # A message can get lost without a new session: a server that dies takes what it has read
        # with it. To send everything again is always safe, because a server drops a command that it
        # has had.
        if self._pending.open_tickets and now - self._heard > _PATIENCE_SECONDS:
            self._heard = now
            self._pending.send_again()
        self._send_out()

    def _take_view(self) -> None:
        view = self._registrar_client.view
        if view is not None and view.number > self._pending.view.number:
            self._pending.take_view(view)
            # A number is never given to another server, so a line that is closed here is not needed
            # again.
            for number in [number for number in self._lines if number not in view.addresses]:
                line = self._lines.pop(number)
                self._saved_before += line.keys.saved_bytes
                self._poller.unregister(line.socket)
                line.close()

    def _send_out(self) -> None:
        # Batches keep the order between this client and each server. There is none between two
        # servers: ranges do not depend on each other.
        batches: defaultdict[int, list[Message]] = defaultdict(list)
        for server, message in self._pending.take_outbox():
            batches[server].append(message)
            self.bytes_sent += _nbytes(message)
        for server, batch in batches.items():
            if self._link is not None:
                for message in batch:
                    self._link.send(message, _nbytes(message))
            self._line(server).send(batch)

    def _patience(self, seconds: float) -> float:
        """How long to wait for messages: no longer than until the next held one is due."""
        held = None if self._link is None else self._link.seconds_left()
        if held is None or held >= seconds:
            return seconds
        if held < 0.001:  # a poll counts whole milliseconds
            time.sleep(held)
        return held

    def _line(self, server: int) -> Line:
        line = self._lines.get(server)
        if line is None:
            address = self._pending.view.addresses[server]
            line = self._lines[server] = Line(self._context, self._key, address, self._arena)
            self._poller.register(line.socket, zmq.POLLIN)
        return line

    def _check(self, began: float) -> None:
        """Raises when waiting longer makes no sense."""
        if self._registrar_client.given_up:
            raise CommError(
                "this worker was given up: the registrar had not heard of it. What it pushed since "
                "is not taken; start it again."
            )
        if self._registrar_client.job_is_over and self._registrar_client.others_are_done:
            raise CommError(
                "this worker was started again too late: the others have finished, and the "
                "parameter servers have ended with the job. Nothing of the job is lost."
            )
        if self._registrar_client.job_is_over:
            raise CommError(
                "the parameter servers have been closed, by the process that started them. If that "
                "was rank 0 or a launcher, see how it ended."
            )
        lost = [n for n, chain in enumerate(self._pending.view.chains) if not chain.servers]
        wanted = {range_ for ranges in self._pending.waited_for().values() for range_ in ranges}
        if wanted & set(lost):
            raise CommError(self._pending.view.lost_because)
        if time.monotonic() - began > self.timeout:
            raise CommError(self._complaint())

    def _complaint(self) -> str:
        who = []
        for server, ranges in self._pending.waited_for().items():
            address = self._pending.view.addresses.get(server or 0, "")
            line = self._lines.get(server or 0)
            why = f" ({line.refused})" if line is not None and line.refused else ""
            name = f"server {server} at {address}{why}" if server else "no server"
            who.append(f"{name} for {len(ranges)} range(s)")
        clocks = self._pending.awaited_clock()
        waits = (
            f" It waits until the slowest of {len(self.members)} workers has reached clock "
            f"{clocks}: one of them may have stopped."
            if clocks is not None
            else ""
        )
        return (
            f"no answer within {self.timeout:g} s from {', '.join(who) or 'anyone'}.{waits} A "
            "larger timeout waits longer."
        )

    def close(self) -> None:
        for line in self._lines.values():
            line.close()


def _nbytes(message: object) -> int:
    values, rows = getattr(message, "values", None), getattr(message, "rows", None)
    return sum(tensor.nbytes for tensor in (values, rows) if tensor is not None)
