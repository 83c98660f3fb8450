"""The connections of a rank that is not connected yet: it is about to join a group that exists."""

from __future__ import annotations

from collections.abc import Sequence

from farandole.comm.transports.base import Transport
from farandole.comm.transports.messages import Message
from farandole.errors import JoinError


class Promised(Transport):
    """Has a rank and a size, and nobody to talk to."""

    name = "promised"

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        raise JoinError(
            f"this worker, which shall be rank {self.rank} of {self.size}, joins a job that is "
            "under way, and cannot exchange anything with other ranks before its training begins."
        )

    def subgroup(self, ranks: Sequence[int]) -> Transport:
        return Promised(list(ranks).index(self.rank), len(ranks), self.timeout)
