"""A server at its sockets: the node, a port for clients and other servers, a line to the registrar.

One thread does everything, one message after the other; sending and receiving of bytes goes on
beside it in zmq's own threads.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import psutil
import zmq

from farandole.errors import JoinError
from farandole.server.channels import Line, Port
from farandole.server.node.node import Node
from farandole.server.node.state import REGISTRAR, Outgoing, Peer
from farandole.server.node.unaddressed import UnaddressedMessages
from farandole.server.protocol.control import BEAT_SECONDS, ControlLine
from farandole.server.protocol.messages import Message
from farandole.server.protocol.payload import Malformed
from farandole.server.protocol.views import Reshape, Reshaped, View
from farandole.server.rules import parse_question, parse_rule

REGISTRAR_PATIENCE = 15.0
_SLICE_SECONDS = 0.05


class Service:
    """Runs until the registrar says that it is over, or is silent for long."""

    def __init__(
        self,
        registrar: str,
        key: bytes,
        *,
        bind: str = "tcp://127.0.0.1:*",
        functions: Sequence[str] = (),
        mark: str = "",
    ) -> None:
        self._context: zmq.Context[Any] = zmq.Context()
        self._key = key
        self._functions = tuple(functions)
        self._port = Port(key, bind)
        self._control = ControlLine(self._context, key, registrar)
        self._registrar = registrar
        self._poller = zmq.Poller()
        self._lines: dict[int, Line] = {}
        self._unaddressed = UnaddressedMessages()
        self._node: Node | None = None
        self._over = False
        self._heard = time.monotonic()
        self._last_beat = 0.0
        self._handled = 0
        self._process = psutil.Process()
        self._control.send({"hello": "server", "address": self._port.address, "mark": mark})

    def run(self, stop: Callable[[], bool] = lambda: False) -> None:
        """Raises `JoinError` when the registrar is silent."""
        self._poller.register(self._control.socket, zmq.POLLIN)
        try:
            while not self._over and not stop():
                self._poller.poll(int(BEAT_SECONDS * 1000 / 2))
                # The registrar first: with a newer view, fewer messages are answered with "moved".
                self._hear_registrar()
                self._hear_servers()
                if self._node is not None:
                    self._hear_port()
                self._beat()
        finally:
            self._close()

    def _hear_port(self) -> None:
        """For a while: busy clients may send faster than this, and the registrar must be heard."""
        began = time.monotonic()
        for peer, messages in self._port.receive():
            self._take(peer, messages)
            if time.monotonic() - began > _SLICE_SECONDS:
                return

    def _take(self, peer: bytes, messages: Sequence[Message]) -> None:
        assert self._node is not None
        number = self._port.server_of(peer)
        sender: Peer = peer if number is None else number
        self._handled += len(messages)
        for message in messages:
            try:
                self._node.receive(sender, message)
            except Malformed:
                self._port.count_drop("malformed")
        self._send_out()

    def _hear_registrar(self) -> None:
        while (said := self._control.receive()) is not None:
            message, _ = said
            self._heard = time.monotonic()
            if "you" in message:
                self._node = Node(
                    message["you"],
                    lambda text: parse_rule(text, self._functions),
                    lambda text: parse_question(text, self._functions),
                )
                # Not before: the registrar has told others of this server, and what those send
                # must wait until it can be taken.
                self._poller.register(self._port.socket, zmq.POLLIN)
            elif "view" in message and self._node is not None:
                self._take_view(View.from_json(message["view"]))
            elif "reshape" in message and self._node is not None:
                range_, epoch, servers = message["reshape"]
                self._node.receive(REGISTRAR, Reshape(range_, epoch, tuple(servers)))
                self._send_out()
            elif "confirm" in message:
                held = self._node.confirmed() if self._node is not None else {}
                answer = {"confirmed": message["confirm"], "held": sorted(held.items())}
                self._control.send(answer)
            elif "unknown" in message or "closed" in message:
                self._over = True  # given up, or the job has ended

    def _hear_servers(self) -> None:
        """Other servers answer on their own lines; on ours come greetings only."""
        for number, line in list(self._lines.items()):
            before = line.sessions
            line.receive()
            if line.sessions > max(before, 1) and self._node is not None:
                # As with clients: the first session loses nothing, each later one may have lost
                # what was sent.
                self._node.reconnected(number)
                self._send_out()

    def _take_view(self, view: View) -> None:
        assert self._node is not None
        for server in [server for server in self._lines if server not in view.addresses]:
            line = self._lines.pop(server)
            self._poller.unregister(line.socket)
            line.close()
        self._node.take_view(view)
        for server, messages in self._unaddressed.take(view):
            self._send_to_server(server, messages)
        self._send_out()

    def _beat(self) -> None:
        now = time.monotonic()
        if now - self._last_beat >= BEAT_SECONDS:
            self._last_beat = now
            self._control.send({"facts": self._facts()})
            if now - self._heard > REGISTRAR_PATIENCE:
                raise JoinError(
                    f"the registrar at {self._registrar} was silent for {REGISTRAR_PATIENCE:g} s; "
                    "this server ends. Is `farandole run` or `farandole server` still running?"
                )

    def _facts(self) -> dict[str, Any]:
        held = self._node.copies.values() if self._node is not None else ()
        return {
            "bytes": sum(one.range.nbytes for one in held),
            "resident": self._resident(),
            "messages": self._handled,
            "drops": dict(self._port.drops),
            "refusals": sum(self._node.refusals.values()) if self._node is not None else 0,
        }

    def _resident(self) -> int:
        try:
            return int(self._process.memory_info().rss)
        except (OSError, psutil.Error):
            return 0  # too many connections: no file can be opened for a while

    def _send_out(self) -> None:
        """Batches what goes to the same peer: the order between two parties is kept."""
        assert self._node is not None
        batches: defaultdict[Peer, list[Outgoing]] = defaultdict(list)
        for outgoing in self._node.take_outbox():
            batches[outgoing.to].append(outgoing)
        for to, batch in batches.items():
            if isinstance(to, bytes):
                self._send_to_client(to, batch)
            elif isinstance(to, int):
                self._send_to_server(to, batch)
            else:
                for outgoing in batch:
                    assert isinstance(outgoing.message, Reshaped)
                    said = [outgoing.message.range, outgoing.message.epoch]
                    self._control.send({"reshaped": said})

    def _send_to_client(self, peer: bytes, batch: Sequence[Outgoing]) -> None:
        lenders = {id(one.lender): one.lender for one in batch if one.lender is not None}
        tracker = self._port.send(peer, _messages(batch), track=bool(lenders))
        if tracker is not None:
            for lender in lenders.values():
                lender.lend(lambda: not tracker.done)

    def _send_to_server(self, number: int, batch: Sequence[Outgoing]) -> None:
        assert self._node is not None
        address = self._node.view.addresses.get(number)
        if address is None:
            self._unaddressed.keep(self._node.view, number, batch)
            return
        line = self._lines.get(number)
        if line is None:
            me = self._node.me
            line = self._lines[number] = Line(
                self._context, self._key, address, name=f"server {me}", server=me
            )
            self._poller.register(line.socket, zmq.POLLIN)
        line.send(_messages(batch))

    def _close(self) -> None:
        for line in self._lines.values():
            line.close()
        self._control.close()
        self._port.close()
        self._context.term()


def _messages(batch: Sequence[Outgoing]) -> list[Message]:
    return [one.message for one in batch if not isinstance(one.message, Reshaped)]
