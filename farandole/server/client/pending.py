"""A client without its sockets: what it has asked, of whom, and what is still open.

Every command has a number, and a server that has had it does nothing when it comes again. So the
rule after any mishap is simple: send everything that is open again, in order, to whoever is the
head now.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from farandole.server.protocol.messages import (
    Ack,
    Command,
    Data,
    Message,
    Moved,
    Problem,
    Read,
    Refused,
)
from farandole.server.protocol.views import View


@dataclass
class OpenRequest:
    """A message without an answer yet."""

    message: Command | Read
    to: int | None  # the server that was asked; None: nobody, for now
    wanted: bool = True  # somebody waits for the answer


@dataclass(frozen=True)
class Answer:
    """What came back: values for a read; `problem` when it was refused."""

    values: torch.Tensor | None = None
    clock: int = 0
    problem: Problem | None = None


class PendingRequests:
    """`ask` and the rest fill `outbox`, whose messages must reach each server in their order."""

    def __init__(self, sender: int) -> None:
        self.sender = sender
        self.view = View()
        self.outbox: list[tuple[int, Message]] = []
        self.answers: dict[int, Answer] = {}
        """By ticket; who waits for one takes it out."""
        self._open: dict[int, OpenRequest] = {}  # in the order of asking
        self._numbers: dict[int, int] = {}  # of the last command to each range
        self._ticket = 0

    def ask(self, message: Command | Read) -> int:
        """Sends it to the head of its range; returns the ticket of the answer. It is ours now."""
        self._ticket += 1
        number = self._numbers.get(message.range, 0) + isinstance(message, Command)
        self._numbers[message.range] = number
        # A command's number counts this sender's commands to the range. A read carries the number
        # of the last one, so that a server answers it only after this client's own writes. Both
        # survive a change of head, because replicas copy the numbers with the commands.
        message.sender, message.number, message.ticket = self.sender, number, self._ticket
        if isinstance(message, Read):
            message.view = self.view.number
        entry = self._open[self._ticket] = OpenRequest(message, None)
        self._send(entry)
        return self._ticket

    def _send(self, entry: OpenRequest) -> None:
        entry.to = self.head_of(entry.message.range)
        if entry.to is not None:
            self.outbox.append((entry.to, entry.message))

    def _send_anew(self, entry: OpenRequest) -> None:
        """The answer may not be written to shared memory any more: whoever was asked before may
        still do so, at a time when that memory serves another end."""
        if isinstance(entry.message, Read) and entry.to is not None:
            entry.message = replace(entry.message, into=None)
        self._send(entry)

    def head_of(self, range_: int) -> int | None:
        return self.view.chains[range_].head if self.view.chains else None

    def take_view(self, view: View) -> None:
        """What is open for a range that has changed hands is sent again."""
        if view.number <= self.view.number:
            return
        before, self.view = self.view.chains, view
        for entry in self._open.values():
            range_ = entry.message.range
            # A new tail or a new replica also counts as a change. The head may then be the same and
            # have the command already; it answers again without doing it again.
            if not before or before[range_] != view.chains[range_]:
                self._send_anew(entry)

    def send_again(self, server: int | None = None) -> None:
        """A connection was lost, or nothing has come for long. None: to all servers."""
        for entry in self._open.values():
            if server is None or entry.to == server:
                self._send_anew(entry)

    def receive(self, server: int, message: Message) -> None:
        if isinstance(message, Ack):
            self._close(message.ticket, Answer(clock=message.clock), Command)
        elif isinstance(message, Data):
            self._close(message.ticket, Answer(message.values, message.clock), Read)
        elif isinstance(message, Refused):
            self._close(message.ticket, Answer(problem=message.problem), (Command, Read))
        elif isinstance(message, Moved):
            self._take_moved(server, message)

    def _take_moved(self, server: int, message: Moved) -> None:
        entry = self._open.get(message.ticket)
        if entry is None or entry.to != server:
            return
        if message.epoch > self.view.chains[message.range].epoch:
            entry.to = None  # the view that says where to is on its way, and then it is sent again
            return
        # The server has not heard yet that it is the head. What was asked after this one may have
        # found it informed, and without the one before, so that goes again too.
        for ticket, later in self._open.items():
            if ticket >= message.ticket and later.message.range == message.range:
                self._send_anew(later)

    def _close(
        self, ticket: int, answer: Answer, kind: type[Command | Read] | tuple[type, ...]
    ) -> None:
        entry = self._open.get(ticket)
        # A second answer to the same ticket finds nothing open and is dropped. Answers can come
        # twice after anything was sent again.
        if entry is not None and isinstance(entry.message, kind):
            del self._open[ticket]
            if entry.wanted:
                self.answers[ticket] = answer

    @property
    def open_tickets(self) -> int:
        return len(self._open)

    def forget(self, ticket: int) -> None:
        """Nobody waits for this answer any more. A command is still delivered."""
        self.answers.pop(ticket, None)
        entry = self._open.get(ticket)
        if entry is not None:
            entry.wanted = False

    def waited_for(self) -> dict[int | None, list[int]]:
        """The servers with open messages, and the ranges that these are about."""
        found: dict[int | None, list[int]] = {}
        for entry in self._open.values():
            found.setdefault(entry.to, []).append(entry.message.range)
        return {server: sorted(set(ranges)) for server, ranges in found.items()}

    def awaited_clock(self) -> int | None:
        """The clock that an open read waits for, if one does."""
        messages = [entry.message for entry in self._open.values()]
        needs = max((m.needs for m in messages if isinstance(m, Read)), default=-1)
        return needs if needs >= 0 else None

    def take_outbox(self) -> Iterator[tuple[int, Message]]:
        outbox, self.outbox = self.outbox, []
        yield from outbox
