"""A server without its sockets: messages in, messages out.

Chain replication (van Renesse and Schneider 2004), range by range:

    client ──command──▶ head ──Forward──▶ replica ──Forward──▶ tail
           ◀───Ack────       ◀───Done────         ◀───Done────

The head gives every command its place in the order and applies it; the others apply what they get
in that order. A command is acknowledged when the tail has it. Whoever is not the tail keeps a log
of what those behind it may not have yet; so when a server dies, its neighbours in the chain close
the gap by sending that log again, and when the head dies the next one has everything that was ever
acknowledged. Reads are answered by the head.

The parts: `replication` keeps the chains, `requests` serves clients, `moving` moves ranges to other
servers. This file takes messages and views, and gives each to its part.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator

from farandole.server.node.moving import Moving
from farandole.server.node.range import Range
from farandole.server.node.replication import Replication
from farandole.server.node.requests import ClientRequests
from farandole.server.node.server_copy import ServerCopy
from farandole.server.node.state import NodeState, Outgoing, Peer, Question
from farandole.server.protocol.messages import (
    Behind,
    Command,
    Done,
    Forward,
    Got,
    Kind,
    Message,
    Read,
    Snapshot,
)
from farandole.server.protocol.views import Chain, Reshape, View
from farandole.server.rules import Rule


class Node:
    """`receive` and `take_view` fill the outbox; whoever has the sockets empties it."""

    def __init__(
        self,
        me: int,
        read_rule: Callable[[str], Rule],
        read_question: Callable[[str], Question],
    ) -> None:
        self._state = NodeState(me, read_rule, read_question)
        self._moving = Moving(self._state)
        self._replication = Replication(self._state, self._moving)
        self._requests = ClientRequests(self._state, self._replication)

    @property
    def me(self) -> int:
        return self._state.me

    @property
    def view(self) -> View:
        return self._state.view

    @property
    def copies(self) -> dict[int, ServerCopy]:
        """What this server holds, by the number of the range."""
        return self._state.copies

    @property
    def refusals(self) -> Counter[str]:
        return self._state.outbox.refusals

    def take_outbox(self) -> Iterator[Outgoing]:
        return self._state.outbox.take()

    def receive(self, sender: Peer, message: Message | Reshape) -> None:
        """Anything but a view. What makes no sense any more, in this view, is left unanswered.

        Raises `Malformed` for what no server can have meant, and then nothing has changed.
        """
        if isinstance(message, Command) and isinstance(sender, bytes):
            self._requests.take_command(sender, message)
        elif isinstance(message, Read) and isinstance(sender, bytes):
            self._requests.take_read(sender, message)
        elif isinstance(message, Forward):
            self._replication.take_forward(sender, message)
        elif isinstance(message, Done):
            self._replication.take_done(sender, message)
        elif isinstance(message, Behind):
            self._replication.take_behind(sender, message)
        elif isinstance(message, Snapshot) and isinstance(sender, int):
            self._moving.take_snapshot(sender, message)
        elif isinstance(message, Got):
            self._moving.take_got(sender, message)
        elif isinstance(message, Reshape):
            self._moving.begin(message)

    def take_view(self, view: View) -> None:
        if view.number <= self._state.view.number:
            return
        self._state.view = view
        # Chains first, then members: the command MEMBERS must enter a log whose successor is known.
        for number, chain in enumerate(view.chains):
            self._take_chain(number, chain)
        for copy in list(self._state.copies.values()):
            self._write_members(copy)
            self._requests.wake(copy)

    def reconnected(self, server: int) -> None:
        """What was on its way to `server` may be lost."""
        for copy in self._state.copies.values():
            if copy.after(self._state.me) == server:
                self._replication.send_log(copy, copy.done)
            if copy.before(self._state.me) == server:
                self._replication.greet(copy)
            self._moving.send_snapshot_again(copy, server)
            self._moving.confirm_again(copy, server)

    def confirmed(self) -> dict[int, int]:
        """The ranges of which this server holds a whole copy in a chain, and the chain's epoch."""
        return {
            number: copy.chain.epoch
            for number, copy in self._state.copies.items()
            if copy.is_copy_of(self._state.me)
        }

    # Chains

    def _take_chain(self, number: int, chain: Chain) -> None:
        copy = self._state.copies.get(number)
        if self._state.me not in chain.servers:
            if copy is not None and copy.chain.epoch < chain.epoch:
                del self._state.copies[number]
                self._requests.turn_away(copy, chain)
            return
        if copy is None:
            if chain.epoch > 1:
                return  # it should have come as a snapshot; without it there is nothing to serve
            copy = self._state.copies[number] = ServerCopy(
                Range(number, self._state.read_rule), chain
            )
        elif copy.chain.epoch >= chain.epoch:
            return  # known already, or older than a snapshot that has overtaken this view
        copy.chain = chain
        copy.order, copy.lacking, copy.sent_snapshots = None, set(), False
        if copy.after(self._state.me) is None:
            self._replication.are_done(copy, copy.range.version)
        else:
            self._replication.send_log(copy, copy.done)
        if copy.before(self._state.me) is not None:
            self._replication.greet(copy)
            self._requests.turn_away(copy, chain)
        self._requests.take_held_back(copy)

    def _write_members(self, copy: ServerCopy) -> None:
        members = frozenset(self._state.view.members)
        # Membership is a command in the log like any other. So all replicas change it at the same
        # place in the order, and end rounds with the same pushes in them.
        writes = copy.chain.head == self._state.me and copy.order is None
        if writes and members != copy.range.clocks.members:
            text = json.dumps(sorted(members))
            self._requests.append(copy, Command(Kind.MEMBERS, copy.range.number, text=text), None)
