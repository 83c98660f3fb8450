"""What clients ask of a server: commands to the head of a range, and reads."""

from __future__ import annotations

import torch

from farandole.server.node.clocks import RESTING
from farandole.server.node.replication import Replication
from farandole.server.node.server_copy import Client, ServerCopy
from farandole.server.node.state import NodeState
from farandole.server.protocol.messages import (
    DESCRIPTION,
    DOTS,
    UPDATES,
    Command,
    Data,
    Kind,
    Moved,
    Problem,
    Read,
)
from farandole.server.protocol.views import Chain


class ClientRequests:
    """Takes commands and reads of the ranges whose head this server is."""

    def __init__(self, state: NodeState, replication: Replication) -> None:
        self._state = state
        self._outbox = state.outbox
        self._replication = replication

    def take_command(self, asker: Client, command: Command) -> None:
        copy = self._headed_copy(asker, command)
        if copy is None:
            return
        if (
            # While the range moves, nothing may enter the log: it would be in no snapshot. A push
            # of a later round waits for its round. And a sender's commands stay in order, also
            # among those held back.
            copy.order is not None
            or copy.range.is_early(command)
            or copy.waits_for_another(command)
        ):
            copy.held_back.append((asker, command))
        elif copy.range.has_had(command):
            self._answer_again(copy, asker, command)
        elif copy.range.has_missed_before(command):
            pass  # one got lost on the way; its sender will send both again
        else:
            problem = self._problem_with(copy, command)
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
                self.append(copy, void, asker)
            else:
                self.append(copy, command, asker)

    def _answer_again(self, copy: ServerCopy, asker: Client, command: Command) -> None:
        for entry in copy.log:
            if (entry.command.sender, entry.command.number) == (command.sender, command.number):
                # The command is on its way down the chain. Its sender has connected again, so the
                # answer goes there.
                entry.asker = asker
                return
        problem = self._problem_with(copy, command)  # tables never change, so it is what it was
        if problem is not None:
            self._outbox.refuse(asker, command.ticket, problem)
        else:
            self._replication.acknowledge(copy, command, asker)

    def _problem_with(self, copy: ServerCopy, command: Command) -> Problem | None:
        if command.kind in (Kind.MEMBERS, Kind.VOID) or not command.sender:
            return Problem(f"{command.kind.name} is not for clients to say.")
        if not -1 <= command.clock < RESTING:
            return Problem(f"{command.clock} is no clock.")
        if command.sender in self._state.view.gone:
            return Problem(
                "this worker was given up: it had not been heard of. It must join again."
            )
        return copy.range.problem_with(command)

    def take_read(self, asker: Client, read: Read) -> None:
        copy = self._headed_copy(asker, read)
        if copy is None:
            return
        # Its sender's own commands come first: one of them may create the table.
        problem = copy.range.problem_with(read) if copy.range.has_had(read) else None
        if problem is not None:
            self._outbox.refuse(asker, read.ticket, problem)
        # A read that waits for "all members" must not be answered by a server that knows fewer
        # members than the reader does.
        elif read.view <= self._state.view.number and copy.range.is_far_enough(read):
            self._answer(copy, asker, read)
        else:
            copy.waiting.append((asker, read))

    def _headed_copy(self, asker: Client, message: Command | Read) -> ServerCopy | None:
        """The range of the message, if this server is its head; else the asker learns who is."""
        copy = self._state.copies.get(message.range)
        if copy is not None and copy.chain.head == self._state.me:
            return copy
        chains = self._state.view.chains
        if chains and not 0 <= message.range < len(chains):
            self._outbox.refuse(
                asker, message.ticket, Problem(f"there is no range {message.range}.")
            )
        else:
            epoch = chains[message.range].epoch if chains else 0
            self._outbox.tell(asker, Moved(message.ticket, message.range, epoch))
        return None

    def wake(self, copy: ServerCopy) -> None:
        """Goes on with what the last command made possible."""
        if copy.held_back and copy.order is None:
            self.take_held_back(copy)
        if copy.waiting:
            waiting, copy.waiting = copy.waiting, []
            for asker, read in waiting:
                self.take_read(asker, read)

    def _answer(self, copy: ServerCopy, asker: Client, read: Read) -> None:
        shard = copy.range.shards[read.table]
        values = shard.read(read)
        clock = shard.round if shard.table.rounds else copy.range.clocks.slowest
        if read.text == UPDATES:
            self._outbox.tell(asker, Data(read.ticket, torch.tensor([shard.steps]), clock))
            return
        if read.text == DESCRIPTION:
            text = bytearray(shard.table.to_json().encode())
            answer = torch.frombuffer(text, dtype=torch.uint8)
            self._outbox.tell(asker, Data(read.ticket, answer, clock))
            return
        if read.text:
            try:
                if read.text.startswith(DOTS):
                    answer = shard.products(read.text.removeprefix(DOTS))
                else:
                    answer = self._state.read_question(read.text)(values).reshape(-1).contiguous()
            except Exception as error:  # the user's own function may raise anything
                self._outbox.refuse(asker, read.ticket, Problem(f"{read.text}: {error}"))
                return
            self._outbox.tell(asker, Data(read.ticket, answer, clock))
            return
        flat = values.reshape(-1)
        if read.into is not None and read.into.nbytes == flat.nbytes:
            read.into.view(flat.dtype).copy_(flat)
            self._outbox.tell(asker, Data(read.ticket, None, clock))
            return
        # The weights themselves are being sent, without a copy. The shard is told, and copies them
        # before the next change if they are still being read.
        lender = shard if read.rows is None else None  # a list of rows is a copy already
        self._outbox.tell(asker, Data(read.ticket, flat, clock), lender)

    def append(self, copy: ServerCopy, command: Command, asker: Client | None) -> None:
        """Gives a command its place in the order, and goes on with what that made possible."""
        self._replication.append(copy, command, asker)
        self.wake(copy)

    def take_held_back(self, copy: ServerCopy) -> None:
        held_back, copy.held_back = copy.held_back, []
        for asker, command in held_back:
            self.take_command(asker, command)

    def turn_away(self, copy: ServerCopy, chain: Chain) -> None:
        """Those who wait here must ask the new head."""
        tickets = [(asker, read.ticket) for asker, read in copy.waiting]
        tickets += [(asker, command.ticket) for asker, command in copy.held_back]
        for asker, ticket in tickets:
            self._outbox.tell(asker, Moved(ticket, copy.range.number, chain.epoch))
        copy.waiting, copy.held_back = [], []
