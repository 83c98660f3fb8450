"""A transport whose messages between pretended hosts take as long as over a link of a given rate.

The bytes travel at once by the transport below, whatever it is. Each message to another host is
followed by a stamp: when it would have arrived. Its sender goes on when the message would have left
its host, and its receiver when it would have arrived:

    sender    ├ message, stamp ┤········ left ▶
    receiver  ├─────────── message, stamp ─┤·········· arrives ▶

So what the machine itself needs for a message is not added to what the link needs. Collectives are
made of messages here, as they are between real hosts. Messages inside a host pass unchanged.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from farandole.comm.transports.base import Transport
from farandole.comm.transports.messages import Message, PeerLost
from farandole.comm.transports.network import Network
from farandole.comm.transports.simulated.link_clock import LinkClock, sleep_until
from farandole.network_link import NetworkLink
from farandole.topology import Topology


@dataclass(frozen=True)
class SimulatedLinks:
    """The links of pretended hosts: who is on which, how fast they are, and the clock's file."""

    topology: Topology
    link: NetworkLink
    file: Path

    def clock(self) -> LinkClock:
        return LinkClock(self.file, len(self.topology.hosts), self.link)


class Simulated(Network):
    """`carrier` with links between its ranks' `hosts`, of which `clock` keeps the time."""

    def __init__(self, carrier: Transport, hosts: Sequence[int], clock: LinkClock) -> None:
        names = [f"host-{host}" for host in hosts]
        super().__init__(carrier.rank, carrier.size, carrier.timeout, Topology.from_names(names))
        self.name = f"simulated {carrier.name}"  # type: ignore[misc]
        self._carrier = carrier
        self._hosts = tuple(hosts)
        self._clock = clock

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        self.begin(sends, receives)()

    def begin(self, sends: Sequence[Message], receives: Sequence[Message]) -> Callable[[], None]:
        """Over a transport that is no `Network` it returns only when the bytes are through."""
        here = self._hosts[self.rank]
        left: list[tuple[int, float]] = []
        outgoing: list[Message] = []
        for peer, data in sends:
            outgoing.append((peer, data))
            if self._hosts[peer] != here:
                transit = self._clock.book(data.nbytes, here, self._hosts[peer])
                left.append((peer, transit.left))
                outgoing.append((peer, torch.tensor([transit.arrives], dtype=torch.float64)))
        stamps: list[tuple[int, torch.Tensor]] = []
        incoming: list[Message] = []
        for peer, into in receives:
            incoming.append((peer, into))
            if self._hosts[peer] != here:
                stamps.append((peer, torch.zeros(1, dtype=torch.float64)))
                incoming.append(stamps[-1])
        finish = self._start(outgoing, incoming)

        def wait() -> None:
            finish()
            self._wait_until([*left, *((peer, float(stamp)) for peer, stamp in stamps)])

        return wait

    def _start(self, sends: Sequence[Message], receives: Sequence[Message]) -> Callable[[], None]:
        if isinstance(self._carrier, Network):
            return self._carrier.begin(sends, receives)
        self._carrier.exchange(sends, receives)
        return _nothing

    def _wait_until(self, moments: Sequence[tuple[int, float]]) -> None:
        if not moments:
            return
        peer, last = max(moments, key=lambda moment: moment[1])
        limit = self.timeout.total_seconds()
        if last - time.monotonic() > limit:  # on a real link the message would be as late
            time.sleep(limit)
            raise PeerLost.late([peer], limit)
        sleep_until(last)

    def beside(self) -> Simulated:
        carrier = self._carrier
        other = (
            carrier.beside()
            if isinstance(carrier, Network)
            else carrier.channel(range(self.size))  # memory of its own, for another thread
        )
        return Simulated(other, self._hosts, self._clock)

    def subgroup(self, ranks: Sequence[int]) -> Simulated:
        hosts = [self._hosts[rank] for rank in ranks]
        return Simulated(self._carrier.subgroup(ranks), hosts, self._clock)

    def channel(self, ranks: Sequence[int]) -> Transport:
        hosts = [self._hosts[rank] for rank in ranks]
        below = self._carrier.channel(ranks)
        return below if len(set(hosts)) == 1 else Simulated(below, hosts, self._clock)

    def blame(self, lost: PeerLost) -> PeerLost:
        return self._carrier.blame(lost)

    def interrupt(self) -> None:
        self._carrier.interrupt()

    def abandon(self) -> None:
        self._carrier.abandon()

    def close(self) -> None:
        self._carrier.close()


def _nothing() -> None: ...
