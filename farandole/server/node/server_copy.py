"""A server's copy of one range: its place in the chain, and what is under way there.

The rules of chain replication are in replication.py; this is the state that they work on.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from farandole.server.node.range import Range
from farandole.server.protocol.messages import Command, Read
from farandole.server.protocol.views import Chain, Reshape

Client = bytes


@dataclass
class Entry:
    """A command that replicas further down may not have yet."""

    index: int
    command: Command
    asker: Client | None  # whom to answer when they have


@dataclass
class ServerCopy:
    """A range that this server holds, and its place in the chain."""

    range: Range
    chain: Chain
    log: deque[Entry] = field(default_factory=deque)
    done: int = 0
    waiting: list[tuple[Client, Read]] = field(default_factory=list)
    order: Reshape | None = None  # while it is being moved
    lacking: set[int] = field(default_factory=set)  # newcomers without the snapshot
    sent_snapshots: bool = False
    brought_by: int | None = None  # the head that sent the snapshot; None: no other server did
    held_back: list[tuple[Client, Command]] = field(default_factory=list)
    """Commands that wait: for the move to end, or for the round before theirs."""

    def is_copy_of(self, me: int) -> bool:
        """Whether this server is in the chain, so that everything acknowledged is in its copy: a
        command is acknowledged when the whole chain has it, and who enters a chain has got a
        snapshot before."""
        return me in self.chain.servers

    def after(self, me: int) -> int | None:
        place = self.chain.servers.index(me) + 1 if me in self.chain.servers else -1
        return self.chain.servers[place] if 0 < place < len(self.chain.servers) else None

    def before(self, me: int) -> int | None:
        place = self.chain.servers.index(me) if me in self.chain.servers else 0
        return self.chain.servers[place - 1] if place > 0 else None

    def waits_for_another(self, command: Command) -> bool:
        """Whether an earlier command of the same sender is held back."""
        return any(
            one.sender == command.sender and one.number < command.number
            for _, one in self.held_back
        )
