"""Ranks as threads of one process.

It serves two ends: a run that is alone is a world of one (so nothing else needs a special case),
and tests run many ranks fast and deterministically. Contributions are reduced in rank order by
each rank for itself, so every rank gets the same bits, and the same bits every time.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch

from farandole.comm.arithmetic import Op, reduce_into
from farandole.comm.transports.base import Transport
from farandole.comm.transports.messages import Message, PeerLost
from farandole.topology import Topology


class Exchange:
    """Where the ranks of an in-process world meet."""

    def __init__(self, size: int, timeout: timedelta = timedelta(seconds=60)) -> None:
        self.size = size
        self.timeout = timeout
        self._lock = threading.Condition()  # over a lock that its holder may take again
        self._round = 0
        self._given: dict[int, Any] = {}
        self._taken: list[Any] = []
        self._mail: defaultdict[tuple[int, int], deque[torch.Tensor]] = defaultdict(deque)
        self._broken: PeerLost | None = None
        self._inner: dict[tuple[tuple[int, ...], int], Exchange] = {}

    def swap(self, rank: int, value: Any) -> list[Any]:
        """Gives `value` for this round; returns all values in rank order once all have given.

        Raises `PeerLost` naming the ranks that did not come within the timeout, or the rank that
        failed. After that the exchange stays closed: a late rank must not meet a round that others
        have left.
        """
        with self._lock:
            turn = self._round
            self._given[rank] = value
            if len(self._given) == self.size and self._broken is None:
                self._taken = [self._given[r] for r in range(self.size)]
                self._given = {}
                self._round += 1
                self._lock.notify_all()
                return self._taken
            # A later round cannot overwrite `_taken` before this rank has read it: it needs this
            # rank's own contribution first.
            self._wait(
                lambda: self._round > turn,
                lambda: sorted(set(range(self.size)) - set(self._given)),
            )
            return self._taken

    def post(self, source: int, to: int, data: torch.Tensor) -> None:
        with self._lock:
            self._mail[source, to].append(data)
            self._lock.notify_all()

    def fetch(self, source: int, to: int) -> torch.Tensor:
        with self._lock:
            self._wait(lambda: bool(self._mail[source, to]), lambda: [source])
            return self._mail[source, to].popleft()

    def inner(self, ranks: Sequence[int], turn: int) -> Exchange:
        """The meeting place of the `turn`-th subgroup of `ranks`: the same for all its members."""
        with self._lock:
            return self._inner.setdefault((tuple(ranks), turn), Exchange(len(ranks), self.timeout))

    def fail(self, rank: int, reason: str) -> None:
        """Wakes everyone who waits, with an error: a rank has failed and will not come."""
        with self._lock:
            if self._broken is None:
                self._broken = PeerLost([rank], reason)
            self._lock.notify_all()
            # Outside the lock: each inner exchange takes its own, and a rank that waits there may
            # hold it.
            inner = list(self._inner.items())
        for (ranks, _), exchange in inner:
            if rank in ranks:
                exchange.fail(ranks.index(rank), reason)

    def _wait(self, arrived: Callable[[], bool], missing: Callable[[], list[int]]) -> None:
        deadline = time.monotonic() + self.timeout.total_seconds()
        while not arrived():
            if self._broken is not None:
                raise self._broken.naming(self._broken.ranks)
            left = deadline - time.monotonic()
            if left <= 0:
                self._broken = PeerLost.late(missing(), self.timeout.total_seconds())
                self._lock.notify_all()
                continue
            self._lock.wait(left)


class InProcess(Transport):
    """One thread's end of an `Exchange`."""

    name = "in-process"
    native_is_fastest = True
    never_waits = True

    def __init__(self, exchange: Exchange, rank: int, topology: Topology | None = None) -> None:
        super().__init__(rank, exchange.size, exchange.timeout, topology)
        self._exchange = exchange
        self._subgroups: Counter[tuple[int, ...]] = Counter()

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        for peer, data in sends:
            # The sender may change its tensor as soon as this returns, and the receiver may come
            # much later.
            self._exchange.post(self.rank, peer, data.detach().clone())
        for peer, into in receives:
            into.copy_(self._exchange.fetch(peer, self.rank))

    def subgroup(self, ranks: Sequence[int]) -> InProcess:
        self._subgroups[tuple(ranks)] += 1
        inner = self._exchange.inner(ranks, self._subgroups[tuple(ranks)])
        return InProcess(inner, list(ranks).index(self.rank))

    def share(self, claim: str) -> list[str]:
        return self._exchange.swap(self.rank, claim)

    def native_all_reduce(self, flat: torch.Tensor, op: Op, claim: str | None) -> None:
        if claim is not None:
            self.agree(claim)
        reduce_into(flat, self._exchange.swap(self.rank, flat.detach().clone()), op)
