"""What a transport between hosts can do beyond `exchange`: leave messages under way."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence

from farandole.comm.transports.base import Transport
from farandole.comm.transports.messages import Message


class Network(Transport):
    """A transport that reaches all ranks of a job, wherever they are."""

    @abstractmethod
    def begin(self, sends: Sequence[Message], receives: Sequence[Message]) -> Callable[[], None]:
        """The first half of `exchange`. What it returns is the second: it waits until everything
        is through."""

    @abstractmethod
    def beside(self) -> Network:
        """Another transport over the same connections, for another thread. All ranks call it."""

    @abstractmethod
    def subgroup(self, ranks: Sequence[int]) -> Network: ...
