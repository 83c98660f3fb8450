"""A server without its sockets: messages in, messages out.

Chain replication (van Renesse and Schneider 2004), range by range:

    client ──command──▶ head ──Forward──▶ replica ──Forward──▶ tail
           ◀───Ack────       ◀───Done────         ◀───Done────

The head gives every command its place in the order and applies it; the others apply what they get
in that order. A command is acknowledged when the tail has it. Whoever is not the tail keeps a log
of what those behind it may not have yet; so when a server dies, its neighbours in the chain close
the gap by sending that log again, and when the head dies the next one has everything that was ever
acknowledged. Reads are answered by the head.

A range moves when the registrar says `Reshape`: the head takes no more commands for it, waits until
the chain is done with those it took, sends a snapshot to the newcomers, and reports. The next view
says who is head then; commands that came meanwhile wait, or are told where to go.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

import torch

from farandole.server.node.clocks import RESTING
from farandole.server.node.range import Range
from farandole.server.node.server_copy import Client, Entry, Held
from farandole.server.node.table_shard import TableShard
from farandole.server.protocol.messages import (
    DESCRIPTION,
    UPDATES,
    Ack,
    Behind,
    Command,
    Data,
    Done,
    Forward,
    Got,
    Kind,
    Message,
    Moved,
    Problem,
    Read,
    Refused,
    Snapshot,
)
from farandole.server.protocol.payload import Malformed
from farandole.server.protocol.views import Chain, Reshape, Reshaped, View
from farandole.server.rules import Rule

REGISTRAR: Final = "registrar"
Peer = Client | int | str
"""A client, a server by its number, or the registrar."""

Question = Callable[[torch.Tensor], torch.Tensor]


class Outgoing(NamedTuple):
    to: Peer
    message: Message | Reshaped
    lender: TableShard | None = None  # whose memory is in the message


class Node:
    """`receive` and `take_view` fill `outbox`; whoever has the sockets empties it."""

    def __init__(
        self,
        me: int,
        read_rule: Callable[[str], Rule],
        read_question: Callable[[str], Question],
    ) -> None:
        self.me = me
        self.view = View()
        self.held: dict[int, Held] = {}
        self.outbox: list[Outgoing] = []
        self.refusals: Counter[str] = Counter()
        self._read_rule = read_rule
        self._read_question = read_question

    def receive(self, sender: Peer, message: Message | Reshape) -> None:
        """Anything but a view. What makes no sense any more, in this view, is left unanswered.

        Raises `Malformed` for what no server can have meant, and then nothing has changed.
        """
        if isinstance(message, Command) and isinstance(sender, bytes):
            self._take_command(sender, message)
        elif isinstance(message, Read) and isinstance(sender, bytes):
            self._take_read(sender, message)
        elif isinstance(message, Forward):
            self._take_forward(sender, message)
        elif isinstance(message, Done):
            self._take_done(sender, message)
        elif isinstance(message, Behind):
            held = self._linked(message)
            if held is not None and held.after(self.me) == sender:
                self._send_log(held, message.index)
        elif isinstance(message, Snapshot) and isinstance(sender, int):
            self._take_snapshot(sender, message)
        elif isinstance(message, Got):
            self._take_got(sender, message)
        elif isinstance(message, Reshape):
            self._begin_reshape(message)

    def take_view(self, view: View) -> None:
        if view.number <= self.view.number:
            return
        self.view = view
        for number, chain in enumerate(view.chains):
            self._take_chain(number, chain)
        for held in list(self.held.values()):
            self._write_members(held)
            self._wake(held)

    def reconnected(self, server: int) -> None:
        """What was on its way to `server` may be lost."""
        for number, held in self.held.items():
            if held.after(self.me) == server:
                self._send_log(held, held.done)
            if held.before(self.me) == server:
                self._greet(held)
            if held.order is not None and held.sent_snapshots and server in held.lacking:
                text, tensors = held.range.state()
                self._tell(server, Snapshot(number, held.order.epoch, text, tensors))

    def confirmed(self) -> dict[int, int]:
        """The ranges of which this server holds a whole copy in a chain, and the chain's epoch."""
        return {
            number: held.chain.epoch
            for number, held in self.held.items()
            if held.is_copy_of(self.me)
        }

    # Chains

    def _take_chain(self, number: int, chain: Chain) -> None:
        held = self.held.get(number)
        if self.me not in chain.servers:
            if held is not None and held.chain.epoch < chain.epoch:
                del self.held[number]
                self._turn_away(held, chain)
            return
        if held is None:
            if chain.epoch > 1:
                return  # it should have come as a snapshot; without it there is nothing to serve
            held = self.held[number] = Held(Range(number, self._read_rule), chain)
        elif held.chain.epoch >= chain.epoch:
            return  # known already, or older than a snapshot that has overtaken this view
        held.chain = chain
        held.order, held.lacking, held.sent_snapshots = None, set(), False
        if held.after(self.me) is None:
            self._are_done(held, held.range.version)
        else:
            self._send_log(held, held.done)
        if held.before(self.me) is not None:
            self._greet(held)
            self._turn_away(held, chain)
        self._take_held_back(held)

    def _take_held_back(self, held: Held) -> None:
        held_back, held.held_back = held.held_back, []
        for asker, command in held_back:
            self._take_command(asker, command)

    def _greet(self, held: Held) -> None:
        """Whichever of two neighbours hears of the chain last, what is missing comes."""
        predecessor, number, epoch = held.before(self.me), held.range.number, held.chain.epoch
        if predecessor is not None:
            self._tell(predecessor, Done(number, epoch, held.done))
            self._tell(predecessor, Behind(number, epoch, held.range.version))

    def _turn_away(self, held: Held, chain: Chain) -> None:
        """Those who wait here must ask the new head."""
        tickets = [(asker, read.ticket) for asker, read in held.waiting]
        tickets += [(asker, command.ticket) for asker, command in held.held_back]
        for asker, ticket in tickets:
            self._tell(asker, Moved(ticket, held.range.number, chain.epoch))
        held.waiting, held.held_back = [], []

    def _write_members(self, held: Held) -> None:
        members = frozenset(self.view.members)
        writes = held.chain.head == self.me and held.order is None
        if writes and members != held.range.clocks.members:
            text = json.dumps(sorted(members))
            self._append(held, Command(Kind.MEMBERS, held.range.number, text=text), None)

    def _append(self, held: Held, command: Command, asker: Client | None) -> None:
        """The head gives a command its place in the order."""
        held.range.apply(command)
        self._pass_on(held, command, asker)
        self._wake(held)

    def _pass_on(self, held: Held, command: Command, asker: Client | None) -> None:
        index = held.range.version
        successor = held.after(self.me)
        entry = Entry(index, command, asker)
        held.log.append(entry)
        if successor is None:
            self._are_done(held, index)
        else:
            forward = Forward(held.range.number, held.chain.epoch, index, command)
            self._tell(successor, forward)

    def _send_log(self, held: Held, since: int) -> None:
        successor = held.after(self.me)
        if successor is not None:
            for entry in held.log:
                if entry.index > since:
                    epoch = held.chain.epoch
                    self._tell(
                        successor, Forward(held.range.number, epoch, entry.index, entry.command)
                    )

    def _linked(self, message: Forward | Done | Behind) -> Held | None:
        """The range that a neighbour speaks of, if both see the same chain."""
        held = self.held.get(message.range)
        return held if held is not None and held.chain.epoch == message.epoch else None

    def _take_forward(self, sender: Peer, message: Forward) -> None:
        held = self._linked(message)
        if held is None or held.before(self.me) != sender:
            return
        if message.index == held.range.version + 1:
            problem = held.range.problem_with(message.command, is_forwarded=True)
            if problem is not None or message.command.range != message.range:
                raise Malformed(f"a forwarded command cannot be: {problem}")
            held.range.apply(message.command)
            self._pass_on(held, message.command, None)
        elif message.index > held.range.version + 1:
            self._tell(sender, Behind(message.range, message.epoch, held.range.version))
        elif held.done >= message.index:
            self._tell(sender, Done(message.range, message.epoch, held.done))

    def _take_done(self, sender: Peer, message: Done) -> None:
        held = self._linked(message)
        if held is not None and held.after(self.me) == sender:
            self._are_done(held, message.index)

    def _are_done(self, held: Held, index: int) -> None:
        held.done = max(held.done, index)
        while held.log and held.log[0].index <= held.done:
            entry = held.log.popleft()
            if entry.asker is not None:
                self._acknowledge(held, entry.command, entry.asker)
        predecessor = held.before(self.me)
        if predecessor is not None:
            self._tell(predecessor, Done(held.range.number, held.chain.epoch, held.done))
        self._go_on_reshaping(held)

    # Clients

    def _take_command(self, asker: Client, command: Command) -> None:
        held = self._serving(asker, command)
        if held is None:
            return
        if (
            held.order is not None
            or held.range.is_early(command)
            or held.waits_for_another(command)
        ):
            held.held_back.append((asker, command))
        elif held.range.has_had(command):
            self._answer_again(held, asker, command)
        elif held.range.has_missed_before(command):
            pass  # one got lost on the way; its sender will send both again
        else:
            problem = self._problem_with(held, command)
            if problem is not None:
                # Said when all replicas know: else a successor would wait for this number for ever.
                void = Command(
                    Kind.VOID,
                    command.range,
                    command.sender,
                    command.number,
                    command.ticket,
                    text=problem.text,
                    cause=problem.cause,
                )
                self._append(held, void, asker)
            else:
                self._append(held, command, asker)

    def _answer_again(self, held: Held, asker: Client, command: Command) -> None:
        for entry in held.log:
            if (entry.command.sender, entry.command.number) == (command.sender, command.number):
                entry.asker = asker
                return
        problem = self._problem_with(held, command)  # tables never change, so it is what it was
        if problem is not None:
            self._refuse(asker, command.ticket, problem)
        else:
            self._acknowledge(held, command, asker)

    def _acknowledge(self, held: Held, command: Command, asker: Client) -> None:
        if command.kind == Kind.VOID:
            self._refuse(asker, command.ticket, Problem(command.text, command.cause))
        else:
            self._tell(asker, Ack(command.ticket, held.range.round_of(command.table)))

    def _problem_with(self, held: Held, command: Command) -> Problem | None:
        if command.kind in (Kind.MEMBERS, Kind.VOID) or not command.sender:
            return Problem(f"{command.kind.name} is not for clients to say.")
        if not -1 <= command.clock < RESTING:
            return Problem(f"{command.clock} is no clock.")
        if command.sender in self.view.gone:
            return Problem(
                "this worker was given up: it had not been heard of. It must join again."
            )
        return held.range.problem_with(command)

    def _take_read(self, asker: Client, read: Read) -> None:
        held = self._serving(asker, read)
        if held is None:
            return
        # Its sender's own commands come first: one of them may create the table.
        problem = held.range.problem_with(read) if held.range.has_had(read) else None
        if problem is not None:
            self._refuse(asker, read.ticket, problem)
        elif read.view <= self.view.number and held.range.is_far_enough(read):
            self._answer(held, asker, read)
        else:
            held.waiting.append((asker, read))

    def _serving(self, asker: Client, message: Command | Read) -> Held | None:
        """The range of the message, if this server is its head; else the asker is told."""
        held = self.held.get(message.range)
        if held is not None and held.chain.head == self.me:
            return held
        chains = self.view.chains
        if chains and not 0 <= message.range < len(chains):
            self._refuse(asker, message.ticket, Problem(f"there is no range {message.range}."))
        else:
            epoch = chains[message.range].epoch if chains else 0
            self._tell(asker, Moved(message.ticket, message.range, epoch))
        return None

    def _wake(self, held: Held) -> None:
        """Goes on with what the last command made possible."""
        if held.held_back and held.order is None:
            self._take_held_back(held)
        if held.waiting:
            waiting, held.waiting = held.waiting, []
            for asker, read in waiting:
                self._take_read(asker, read)

    def _answer(self, held: Held, asker: Client, read: Read) -> None:
        shelf = held.range.shelves[read.table]
        values = shelf.read(read)
        clock = shelf.round if shelf.table.rounds else held.range.clocks.slowest
        if read.text == UPDATES:
            self._tell(asker, Data(read.ticket, torch.tensor([shelf.steps]), clock))
            return
        if read.text == DESCRIPTION:
            text = bytearray(shelf.table.to_json().encode())
            answer = torch.frombuffer(text, dtype=torch.uint8)
            self._tell(asker, Data(read.ticket, answer, clock))
            return
        if read.text:
            try:
                answer = self._read_question(read.text)(values).reshape(-1).contiguous()
            except Exception as error:  # the user's own function may raise anything
                self._refuse(asker, read.ticket, Problem(f"{read.text}: {error}"))
                return
            self._tell(asker, Data(read.ticket, answer, clock))
            return
        flat = values.reshape(-1)
        if read.into is not None and read.into.nbytes == flat.nbytes:
            read.into.view(flat.dtype).copy_(flat)
            self._tell(asker, Data(read.ticket, None, clock))
            return
        lender = shelf if read.rows is None else None  # a list of rows is a copy already
        self.outbox.append(Outgoing(asker, Data(read.ticket, flat, clock), lender))

    def _refuse(self, asker: Client, ticket: int, problem: Problem) -> None:
        self.refusals[problem.text] += 1
        self._tell(asker, Refused(ticket, problem))

    # Moving

    def _begin_reshape(self, order: Reshape) -> None:
        held = self.held.get(order.range)
        if held is None or held.chain.epoch != order.epoch or held.chain.head != self.me:
            return
        held.order = order
        held.lacking = set(order.servers) - set(held.chain.servers)
        held.sent_snapshots = False
        self._go_on_reshaping(held)

    def _go_on_reshaping(self, held: Held) -> None:
        order = held.order
        if order is None or held.log or held.sent_snapshots:
            return
        held.sent_snapshots = True
        text, tensors = held.range.state()
        for server in sorted(held.lacking):
            self._tell(server, Snapshot(order.range, order.epoch, text, tensors))
        if not held.lacking:
            self._tell(REGISTRAR, Reshaped(order.range, order.epoch))

    def _take_snapshot(self, sender: int, message: Snapshot) -> None:
        held = self.held.get(message.range)
        if held is not None and held.chain.servers and held.chain.epoch >= message.epoch:
            return
        chains = self.view.chains
        if not 0 <= message.range < (len(chains) or message.range + 1):
            raise Malformed(f"there is no range {message.range}")
        if chains and chains[message.range].epoch > message.epoch:
            return  # the move that it was for has been given up
        range_ = Range.from_state(message.range, message.text, message.tensors, self._read_rule)
        newcomer = Held(range_, Chain(message.epoch, ()))
        newcomer.done = range_.version
        self.held[message.range] = newcomer
        self._tell(sender, Got(message.range, message.epoch))

    def _take_got(self, sender: Peer, message: Got) -> None:
        held = self.held.get(message.range)
        if held is None or held.order is None or held.order.epoch != message.epoch:
            return
        if isinstance(sender, int):
            held.lacking.discard(sender)
        if not held.lacking:
            self._tell(REGISTRAR, Reshaped(message.range, message.epoch))

    def _tell(self, to: Peer, message: Message | Reshaped) -> None:
        self.outbox.append(Outgoing(to, message))

    def take_outbox(self) -> Iterator[Outgoing]:
        outbox, self.outbox = self.outbox, []
        yield from outbox
