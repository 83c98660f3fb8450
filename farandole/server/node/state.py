"""What the parts of a server share: its number, the view, the copies that it holds, its outbox."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import torch

from farandole.server.node.server_copy import Client, ServerCopy
from farandole.server.node.table_shard import TableShard
from farandole.server.protocol.messages import Message, Problem, Refused
from farandole.server.protocol.views import Reshaped, View
from farandole.server.rules import Rule

REGISTRAR: Final = "registrar"
Peer = Client | int | str
"""A client, a server by its number, or the registrar."""

Question = Callable[[torch.Tensor], torch.Tensor]


class Outgoing(NamedTuple):
    to: Peer
    message: Message | Reshaped
    lender: TableShard | None = None  # whose memory is in the message


class Outbox:
    """Messages to send, in order. Whoever has the sockets empties it."""

    def __init__(self) -> None:
        self.refusals: Counter[str] = Counter()
        self._messages: list[Outgoing] = []

    def tell(self, to: Peer, message: Message | Reshaped, lender: TableShard | None = None) -> None:
        self._messages.append(Outgoing(to, message, lender))

    def refuse(self, asker: Client, ticket: int, problem: Problem) -> None:
        self.refusals[problem.text] += 1
        self.tell(asker, Refused(ticket, problem))

    def take(self) -> Iterator[Outgoing]:
        messages, self._messages = self._messages, []
        yield from messages


@dataclass
class NodeState:
    """One server's. `copies` are by the number of their range."""

    me: int
    read_rule: Callable[[str], Rule]
    read_question: Callable[[str], Question]
    view: View = field(default_factory=View)
    copies: dict[int, ServerCopy] = field(default_factory=dict)
    outbox: Outbox = field(default_factory=Outbox)
