"""A whole cluster without sockets, whose messages arrive in whatever order a random choice says.

Between two parties messages keep their order, as on a TCP connection; everything else is free. What
was sent to a dead server is lost; what it sent before its death may still arrive.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Hashable
from typing import Any

import torch

from farandole.server.client.pending import PendingRequests
from farandole.server.node.node import Node
from farandole.server.node.state import REGISTRAR
from farandole.server.protocol.messages import Command, Kind, Read
from farandole.server.protocol.views import Reshape, Reshaped, View
from farandole.server.registrar.registrar import Registrar
from farandole.server.rules import parse_rule
from farandole.server.rules.questions import parse_question
from farandole.server.tables import Table


class Cluster:
    """Registrar, nodes and clients, and the channels between them."""

    def __init__(self, seed: int, servers: int, replicas: int, ranges: int, workers: int) -> None:
        self.random = random.Random(seed)
        self.registrar = Registrar(servers, replicas, ranges)
        self.nodes: dict[int, Node] = {}
        self.clients: dict[bytes, PendingRequests] = {}
        self.channels: dict[tuple[Hashable, Hashable], deque[Any]] = {}
        self.undetected: list[int] = []
        self.sent_view = 0
        for _ in range(servers):
            self.add_server()
        # Those who begin together come in one view, as the registrar's desk sees to.
        for _ in range(workers):
            number = self.registrar.add_worker()
            self.clients[f"client {number}".encode()] = PendingRequests(number)
        self.settle(REGISTRAR)

    def add_server(self) -> int:
        number = self.registrar.add_server(f"server {self.registrar._next_server}")
        self.nodes[number] = Node(number, parse_rule, parse_question)
        self.post(REGISTRAR, number, self.registrar.view)
        self.settle(REGISTRAR)
        return number

    def lose_worker(self, name: bytes) -> None:
        self.registrar.remove_worker(self.clients.pop(name).sender, lost=True)
        self.settle(REGISTRAR)

    def kill(self, number: int) -> None:
        """The registrar notices some time later."""
        del self.nodes[number]
        for source, to in list(self.channels):
            if to == number:
                del self.channels[source, to]
        self.undetected.append(number)

    def can_kill(self, number: int) -> bool:
        """Whether somebody else holds everything that this server holds, and will after a move that
        may be over before the registrar hears of this death."""
        dead = {number, *self.undetected}
        holders = [chain.servers for chain in self.registrar.view.chains]
        holders += [order.servers for order in self.registrar._moving.values()]
        return len(self.nodes) > 1 and all(set(servers) - dead for servers in holders)

    def detect(self) -> None:
        self.registrar.lose_server(self.undetected.pop(0))
        self.settle(REGISTRAR)

    def post(self, source: Hashable, to: Hashable, message: Any) -> None:
        if to == REGISTRAR or to in self.nodes or to in self.clients:
            self.channels.setdefault((source, to), deque()).append(message)

    def settle(self, who: Hashable) -> None:
        """Sends what `who` has to say."""
        if who == REGISTRAR:
            if self.registrar.view.number > self.sent_view:
                self.sent_view = self.registrar.view.number
                for to in [*self.nodes, *self.clients]:
                    self.post(REGISTRAR, to, self.registrar.view)
            orders, self.registrar.orders = self.registrar.orders, []
            for server, order in orders:
                self.post(REGISTRAR, server, order)
        elif isinstance(who, bytes):
            for server, message in self.clients[who].take_outbox():
                self.post(who, server, message)
        elif isinstance(who, int):
            for to, message, _ in self.nodes[who].take_outbox():
                self.post(who, to, message)

    def deliver_any(self) -> bool:
        """One message, from a channel chosen at random; False when all is quiet."""
        busy = [key for key, channel in self.channels.items() if channel]
        if not busy:
            return False
        source, to = busy[self.random.randrange(len(busy))]
        self._deliver(source, to, self.channels[source, to].popleft())
        return True

    def _deliver(self, source: Any, to: Any, message: Any) -> None:
        if to == REGISTRAR:
            assert isinstance(message, Reshaped)
            self.registrar.take_reshaped(source, message)
        elif to in self.clients:
            if isinstance(message, View):
                self.clients[to].take_view(message)
            else:
                self.clients[to].receive(source, message)
        elif to in self.nodes:
            if isinstance(message, View):
                self.nodes[to].take_view(message)
            else:
                assert isinstance(source, (int, bytes)) or isinstance(message, Reshape)
                self.nodes[to].receive(source, message)
        else:
            return
        self.settle(to)

    def run_until(self, over: Callable[[], bool], events: Callable[[], None], limit: int) -> None:
        for _ in range(limit):
            if over():
                return
            events()
            if not self.deliver_any() and self.undetected:
                self.detect()
        raise AssertionError(f"not over after {limit} steps")

    def run_quiet(self) -> None:
        """Until nothing is under way any more."""
        while self.deliver_any() or self.undetected:
            if self.undetected:
                self.detect()

    def heads(self) -> dict[int, Node]:
        chains = enumerate(self.registrar.view.chains)
        return {range_: self.nodes[chain.servers[0]] for range_, chain in chains}


class Worker:
    """Adds 1 to its own row in every range, once a clock, and reads all rows back."""

    def __init__(self, cluster: Cluster, name: bytes, row: int, table: Table, bound: int) -> None:
        self.cluster = cluster
        self.name = name
        self.dialogue = cluster.clients[name]
        self.row, self.table, self.bound = row, table, bound
        self.clock = 0
        self.acknowledged = 0
        self.seen: list[tuple[int, list[float]]] = []  # at which clock, what was read in a range
        self._reads: set[int] = set()
        self._pushes: set[int] = set()
        self._creates: set[int] = set()
        self._created = False

    def step(self, clocks: int) -> None:
        """What can be done now without waiting."""
        if not self.dialogue.view.members:
            return
        self._collect()
        if not self._created:
            for range_ in self.table.used_ranges:
                command = Command(Kind.CREATE, range_, text=self.table.to_json())
                self._creates.add(self.dialogue.ask(command))
            self._created = True
        elif not self._creates and not self._reads and self.clock < clocks:
            self._end_clock()
        self.cluster.settle(self.name)

    def _end_clock(self) -> None:
        place = {"table": self.table.id, "rows": torch.tensor([self.row])}
        for range_ in self.table.used_ranges:
            push = Command(
                Kind.PUSH,
                range_,
                values=torch.ones(1, dtype=torch.float64),
                clock=self.clock,
                ticks=True,
                **place,
            )
            self._pushes.add(self.dialogue.ask(push))
        self.clock += 1
        for range_ in self.table.used_ranges:
            read = Read(
                range_,
                table=self.table.id,
                stop=self.table.rows_in(range_),
                needs=max(0, self.clock - self.bound),
            )
            self._reads.add(self.dialogue.ask(read))

    def _collect(self) -> None:
        for ticket in list(self.dialogue.answers):
            answer = self.dialogue.answers.pop(ticket)
            assert answer.problem is None, answer.problem
            if ticket in self._reads:
                self._reads.remove(ticket)
                assert answer.values is not None
                self.seen.append((self.clock, answer.values.tolist()))
            elif ticket in self._pushes:
                self._pushes.remove(ticket)
                self.acknowledged += 1
            else:
                self._creates.remove(ticket)

    def is_done(self, clocks: int) -> bool:
        self._collect()
        return self.clock == clocks and not self._reads and not self._pushes
