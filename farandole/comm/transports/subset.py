"""Some of a transport's ranks as a transport of their own, over the same connections."""

from __future__ import annotations

from collections.abc import Sequence

from farandole.comm.transports.base import Transport
from farandole.comm.transports.messages import Message, PeerLost


class Subset(Transport):
    """Needs nothing set up, so it serves to set up what does."""

    def __init__(self, parent: Transport, ranks: Sequence[int]) -> None:
        super().__init__(list(ranks).index(parent.rank), len(ranks), parent.timeout)
        self.name = parent.name  # type: ignore[misc]
        self.never_waits = parent.never_waits
        self._parent = parent
        self.ranks = tuple(ranks)

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        try:
            self._parent.exchange(
                [(self.ranks[peer], data) for peer, data in sends],
                [(self.ranks[peer], into) for peer, into in receives],
            )
        except PeerLost as lost:
            here = [self.ranks.index(rank) for rank in lost.ranks if rank in self.ranks]
            raise lost.naming(here) from lost

    def blame(self, lost: PeerLost) -> PeerLost:
        found = self._parent.blame(lost.naming([self.ranks[rank] for rank in lost.ranks]))
        here = [self.ranks.index(rank) for rank in found.ranks if rank in self.ranks]
        return found.naming(here) if here else lost

    def subgroup(self, ranks: Sequence[int]) -> Transport:
        return Subset(self._parent, [self.ranks[rank] for rank in ranks])
