"""Parameter servers over a simulated link. They are on the first pretended host.

What a client sends travels at once, and so does the answer. The client takes the answer only when
it would have come: the request first has to arrive, and then the answer occupies the link on its
way back. Workers on the servers' own host are not delayed.

One thing is earlier than over a real link: a push changes the table when it is sent and not when it
would have arrived, so that other workers may see it up to that time too soon.
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Iterator

from farandole.comm.transports.simulated.link_clock import LinkClock, sleep_until
from farandole.comm.transports.simulated.transport import SimulatedLinks
from farandole.server.protocol.messages import Message

SERVERS_HOST = 0

_Held = tuple[float, int, int, int, Message]
"""When, order, server, bytes, message."""


class LinkToServers:
    """One worker's link to the servers."""

    def __init__(self, clock: LinkClock, host: int) -> None:
        self._clock = clock
        self._host = host
        self._last_arrival = 0.0
        self._arrivals: dict[int, float] = {}  # of requests at the servers, by ticket
        self._order = itertools.count()
        # An answer takes its place on the link only when its request has arrived: a place that is
        # taken ahead would keep others waiting for a link that is idle.
        self._asked: list[_Held] = []
        self._coming: list[_Held] = []

    def send(self, message: Message, nbytes: int) -> None:
        """A request leaves. It does not arrive before those that left before it."""
        sent = self._clock.book(nbytes, self._host, SERVERS_HOST)
        self._last_arrival = max(self._last_arrival, sent.arrives)
        self._arrivals[_ticket(message)] = self._last_arrival

    def hold(self, server: int, message: Message, nbytes: int) -> None:
        """An answer has come; it counts from when it would have."""
        asked = self._arrivals.pop(_ticket(message), self._last_arrival)
        heapq.heappush(self._asked, (asked, next(self._order), server, nbytes, message))

    def due(self) -> Iterator[tuple[int, Message]]:
        """The answers that have come by now, each with its server."""
        now = time.monotonic()
        while self._asked and self._asked[0][0] <= now:
            asked, order, server, nbytes, message = heapq.heappop(self._asked)
            back = self._clock.book(nbytes, SERVERS_HOST, self._host, at=asked)
            heapq.heappush(self._coming, (back.arrives, order, server, nbytes, message))
        while self._coming and self._coming[0][0] <= now:
            _, _, server, _, message = heapq.heappop(self._coming)
            yield server, message

    def seconds_left(self) -> float | None:
        """Until the next answer moves on; None: none is held."""
        nearest = [held[0][0] for held in (self._asked, self._coming) if held]
        return max(0.0, min(nearest) - time.monotonic()) if nearest else None

    def meet(self, sent_bytes: int) -> float:
        """Something goes to the registrar. Returns when it is there."""
        return self._clock.book(sent_bytes, self._host, SERVERS_HOST).arrives

    def wait_for_meeting(self, arrived: float, received_bytes: int) -> None:
        """Until the registrar's answer would have come to what was there at `arrived`."""
        sleep_until(arrived)
        sleep_until(self._clock.book(received_bytes, SERVERS_HOST, self._host).arrives)


def link_to_servers(links: SimulatedLinks, rank: int) -> LinkToServers | None:
    """None for a worker on the servers' own host."""
    host = links.topology.host_index(rank)
    return None if host == SERVERS_HOST else LinkToServers(links.clock(), host)


def _ticket(message: Message) -> int:
    return int(getattr(message, "ticket", -1))
