"""Chain replication of one server's ranges: what it forwards, keeps, and acknowledges.

Two invariants. A server applies the commands of a range in the order that its head gave them,
without gaps. And what a server has, all servers before it in the chain have had before: so the
head answers reads, and any server can become the head.
"""

from __future__ import annotations

from farandole.server.node.moving import Moving
from farandole.server.node.server_copy import Client, Entry, ServerCopy
from farandole.server.node.state import NodeState, Peer
from farandole.server.protocol.messages import (
    Ack,
    Behind,
    Command,
    Done,
    Forward,
    Kind,
    Problem,
)
from farandole.server.protocol.payload import Malformed


class Replication:
    """One server's links in the chains of its ranges."""

    def __init__(self, state: NodeState, moving: Moving) -> None:
        self._state = state
        self._outbox = state.outbox
        self._moving = moving

    def append(self, copy: ServerCopy, command: Command, asker: Client | None) -> None:
        """The head gives a command its place in the order."""
        copy.range.apply(command)
        self._pass_on(copy, command, asker)

    def _pass_on(self, copy: ServerCopy, command: Command, asker: Client | None) -> None:
        index = copy.range.version
        successor = copy.after(self._state.me)
        entry = Entry(index, command, asker)
        # Into the log before it is forwarded: if the successor dies now, the next one gets it from
        # the log.
        copy.log.append(entry)
        if successor is None:
            self.are_done(copy, index)
        else:
            forward = Forward(copy.range.number, copy.chain.epoch, index, command)
            self._outbox.tell(successor, forward)

    def send_log(self, copy: ServerCopy, since: int) -> None:
        """To the successor: all commands after `since`. It drops those that it has had already."""
        successor = copy.after(self._state.me)
        if successor is not None:
            for entry in copy.log:
                if entry.index > since:
                    epoch = copy.chain.epoch
                    self._outbox.tell(
                        successor, Forward(copy.range.number, epoch, entry.index, entry.command)
                    )

    def _linked(self, message: Forward | Done | Behind) -> ServerCopy | None:
        """The range that a neighbour speaks of, if both see the same chain."""
        copy = self._state.copies.get(message.range)
        return copy if copy is not None and copy.chain.epoch == message.epoch else None

    def take_forward(self, sender: Peer, message: Forward) -> None:
        copy = self._linked(message)
        if copy is None or copy.before(self._state.me) != sender:
            return
        # Commands are applied in the head's order without gaps, or not at all: a replica's version
        # is the number of commands it has, and two replicas of one version hold the same bits.
        if message.index == copy.range.version + 1:
            problem = copy.range.problem_with(message.command, is_forwarded=True)
            if problem is not None or message.command.range != message.range:
                raise Malformed(f"a forwarded command cannot be: {problem}")
            copy.range.apply(message.command)
            self._pass_on(copy, message.command, None)
        # A gap: messages got lost with a connection. The predecessor still has them in its log,
        # because this server has not reported them as done.
        elif message.index > copy.range.version + 1:
            self._outbox.tell(sender, Behind(message.range, message.epoch, copy.range.version))
        # A repeated command. The report that it is done may have been lost, so it is made again.
        elif copy.done >= message.index:
            self._outbox.tell(sender, Done(message.range, message.epoch, copy.done))

    def take_done(self, sender: Peer, message: Done) -> None:
        copy = self._linked(message)
        if copy is not None and copy.after(self._state.me) == sender:
            self.are_done(copy, message.index)

    def are_done(self, copy: ServerCopy, index: int) -> None:
        """All replicas from here to the tail have every command up to `index`.

        Only now may a command leave the log and be acknowledged: whichever servers of the chain
        die from here on, one that lives has it.
        """
        copy.done = max(copy.done, index)
        while copy.log and copy.log[0].index <= copy.done:
            entry = copy.log.popleft()
            if entry.asker is not None:
                self.acknowledge(copy, entry.command, entry.asker)
        predecessor = copy.before(self._state.me)
        if predecessor is not None:
            self._outbox.tell(predecessor, Done(copy.range.number, copy.chain.epoch, copy.done))
        self._moving.go_on(copy)

    def take_behind(self, sender: Peer, message: Behind) -> None:
        copy = self._linked(message)
        if copy is not None and copy.after(self._state.me) == sender:
            self.send_log(copy, message.index)

    def acknowledge(self, copy: ServerCopy, command: Command, asker: Client) -> None:
        if command.kind == Kind.VOID:
            self._outbox.refuse(asker, command.ticket, Problem(command.text, command.cause))
        else:
            self._outbox.tell(asker, Ack(command.ticket, copy.range.round_of(command.table)))

    def greet(self, copy: ServerCopy) -> None:
        """Whichever of two neighbours hears of the chain last, what is missing comes."""
        predecessor, number, epoch = (
            copy.before(self._state.me),
            copy.range.number,
            copy.chain.epoch,
        )
        if predecessor is not None:
            self._outbox.tell(predecessor, Done(number, epoch, copy.done))
            self._outbox.tell(predecessor, Behind(number, epoch, copy.range.version))
