"""Messages through a c10d store: slow, but there before anything else is.

It serves to set up a faster transport without connecting every rank to every other first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import timedelta

import torch
from torch.distributed import DistError, Store

from farandole.comm.transports.base import Transport
from farandole.comm.transports.messages import Message, PeerLost
from farandole.comm.transports.subset import Subset


class ByStore(Transport):
    """Between ranks that have `store` to themselves. What was read stays in it."""

    name = "store"
    never_waits = True

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size, timeout)
        self._store = store
        self._sent: Counter[int] = Counter()
        self._received: Counter[int] = Counter()

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        for peer, data in sends:
            # Both ends count the messages between them, so each message has a key of its own and
            # none is read twice. Nothing is deleted: a transport like this lives for a few
            # messages.
            key = f"{self.rank}-{peer}/{self._sent[peer]}"
            self._sent[peer] += 1
            self._store.set(key, data.view(torch.uint8).numpy().tobytes())  # type: ignore[arg-type]
        for peer, into in receives:
            key = f"{peer}-{self.rank}/{self._received[peer]}"
            self._received[peer] += 1
            try:
                self._store.wait([key], self.timeout)
                arrived = bytearray(self._store.get(key))
            except (RuntimeError, DistError) as error:
                seconds = self.timeout.total_seconds()
                raise PeerLost.late([peer], seconds) from error
            into.view(torch.uint8).copy_(torch.frombuffer(arrived, dtype=torch.uint8))

    def subgroup(self, ranks: Sequence[int]) -> Transport:
        return Subset(self, ranks)
