"""Messages between ranks, each known by its label, sent and received behind the caller's back.

A pipeline's ranks do not call collectives together: each goes through a list of its own, and what
it needs comes when it comes. So each link between two ranks, in each direction, has a thread on
both ends. The sender's works off what was posted; the receiver's fetches as many messages as were
said to come, in the order they were sent, and files each under its label.

    rank 0   post(1, F0) post(1, F1) …            take(B0)
                │                                    ▲
    thread      ╰─▶ header, tensors ─▶ thread        │
    rank 1                               ╰─▶ filed: take(F0) … post(0, B0)

Waking a thread takes longer than copying a small message. So where memory carries the messages, the
caller does both itself: what is posted goes at once if there is room for it, and what is taken is
fetched when it is needed, for it lies ready. A thread is left with what would have to wait.

A header can also say that its sender has failed, and why: then whoever waits here is woken with
that reason, passes it on to its own peers, and so all ranks end with the same words and nobody
hangs.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import torch

from farandole.comm.group import Group
from farandole.comm.p2p.choose import receiver_of, sender_of
from farandole.comm.p2p.links import Arrival, Label, Receiver, Sender
from farandole.comm.p2p.payload import describe
from farandole.comm.tensors import flat_view
from farandole.comm.transports.messages import PeerLost
from farandole.errors import CommError

_PATIENCE_SECONDS = 1.0


class Mail:
    """One rank's ends of all links of a group. `routes` are the pairs (from, to) that are used."""

    def __init__(
        self,
        group: Group,
        routes: Collection[tuple[int, int]],
        device: torch.device,
        name_of: Callable[[int], str] = "rank {}".format,
    ) -> None:
        self.rank = group.rank
        self._group = group
        self._name_of = name_of
        self.device = device  # where what arrives is put
        self._changed = threading.Condition()
        self._arrived: dict[Label, Arrival] = {}
        self._failure: str | None = None
        self._failure_sent = False
        # Only one thread at a time may read from a link, because a message is several reads in a
        # row. That is the queue's thread while `_coming` is above 0 for its source, and the caller
        # of `fetch` otherwise.
        self._coming: Counter[int] = Counter()  # messages that a thread is to receive, by source
        self._ahead: Counter[int] = Counter()  # messages that came before they were expected
        self._outgoing: dict[int, Sender] = {}
        self._incoming: dict[int, Receiver] = {}
        # In one order on all ranks, so that no two wait for each other in a circle.
        for source, to in sorted(set(routes)):
            if self.rank not in (source, to) or source == to:
                continue
            transport = group.transport.channel([source, to])
            if self.rank == source:
                self._outgoing[to] = sender_of(transport, group, device)
            else:
                self._incoming[source] = receiver_of(transport, group, device)

    def post(self, to: int, label: Label, value: Any) -> None:
        """Sends `value` and returns at once. Its tensors must not be changed any more.

        Raises `UserError` for what cannot travel. What goes wrong on the way is raised by `take`.
        """
        description, tensors = describe(value)
        if to == self.rank:
            mine = [_own(tensor) for tensor in tensors]
            self._file(label, Arrival.here(label, description.fill(mine), mine))
            return
        sender = self._outgoing[to]
        number, text = sender.number(description)
        # The other end knows one device only, whatever this value was made of.
        flats = [flat_view(tensor).to(self.device) for tensor in tensors]
        if sender.goes_at_once(flats):
            self._guarded(to, sender.send, label, number, text, flats)
        else:
            work = partial(self._guarded, to, sender.send, label, number, text, flats)
            sender.queue.start(work)

    def expect(self, source: int, count: int = 1) -> None:
        """So many messages more will come from there."""
        if source == self.rank:
            return
        receiver = self._incoming[source]
        if receiver.lies_ready:
            return
        for _ in range(count):
            # `fetch` has received messages that were not expected yet. Each of them cancels one
            # expectation. Otherwise the thread would wait for a message more than the peer sends.
            if self._ahead[source]:  # it has come already
                self._ahead[source] -= 1
                continue
            with self._changed:
                self._coming[source] += 1
            receiver.queue.start(partial(self._receive_expected, source, receiver))

    def take(self, source: int, label: Label) -> Any:
        """Waits for the message with this label. Tensors that can have a gradient are leaves.

        Raises `CommError` when a rank has died, took too long or has said that it failed.
        """
        receiver = self._incoming.get(source)
        # No time limit here: what is expected arrives or fails within the transport's own.
        with self._group.meter.waiting():
            if receiver is not None and receiver.lies_ready:
                while label not in self._arrived and self._failure is None:
                    self._guarded(source, self._receive, receiver)
            else:
                with self._changed:
                    self._changed.wait_for(
                        lambda: label in self._arrived or self._failure is not None
                    )
        # What has arrived is returned even after a failure: the peer sent it before.
        return self._taken(label)

    def fetch(self, source: int, label: Label) -> Any:
        """As `take`, where messages may be posted in another order than they are taken, and need
        not be expected: what is not, the caller receives itself, until this one has come.

        To expect a message is to let it come while the caller does something else.
        """
        receiver = self._incoming[source]

        def over() -> bool:
            return label in self._arrived or self._failure is not None

        with self._group.meter.waiting():
            while not over():
                with self._changed:
                    if self._coming[source]:
                        self._changed.wait_for(lambda: over() or not self._coming[source])
                        continue
                if not receiver.lies_ready:
                    self._ahead[source] += 1
                self._guarded(source, self._receive, receiver)
        return self._taken(label)

    def _taken(self, label: Label) -> Any:
        if label not in self._arrived:
            raise CommError(self._failure)
        arrival = self._arrived.pop(label)
        arrival.wait()  # it may come on another stream of the GPU
        return arrival.value

    def fail(self, reason: str) -> None:
        """Tells all peers, once, that nothing more will come from here, and why."""
        with self._changed:
            self._failure = self._failure or reason
            if self._failure_sent:
                return
            self._failure_sent = True
            self._changed.notify_all()
        # Through the queue, behind everything posted before: the peer still gets what it can use,
        # and the header of the failure does not cut into a message.
        for to, sender in self._outgoing.items():
            sender.queue.start(partial(self._guarded, to, sender.fail, reason))

    def settle(self, seconds: float) -> None:
        """Waits until everything posted is on its way, but no longer than so many seconds."""
        for sender in self._outgoing.values():
            sender.queue.settle(seconds)

    @property
    def failure(self) -> str | None:
        return self._failure

    def close(self) -> None:
        links: list[Sender | Receiver] = [*self._outgoing.values(), *self._incoming.values()]
        for link in links:
            link.queue.settle(_PATIENCE_SECONDS)
            link.transport.close()
        self._outgoing.clear()
        self._incoming.clear()

    def _receive_expected(self, source: int, receiver: Receiver) -> None:
        try:
            self._guarded(source, self._receive, receiver)
        finally:
            with self._changed:
                self._coming[source] -= 1
                self._changed.notify_all()

    def _receive(self, receiver: Receiver) -> None:
        # The messages that were still expected will not come. Their turns in the queue pass at
        # once.
        if self._failure is not None:
            return
        arrival = receiver.receive()
        if arrival.label is None:
            self._broken(arrival.value)
        else:
            self._file(arrival.label, arrival)

    def _file(self, label: Label, arrival: Arrival) -> None:
        with self._changed:
            self._arrived[label] = arrival
            self._changed.notify_all()

    def _broken(self, reason: str) -> None:
        with self._changed:
            self._failure = self._failure or reason
            self._changed.notify_all()

    def _guarded(self, peer: int, work: Callable[..., None], *given: Any) -> None:
        try:
            work(*given)
        except PeerLost as lost:
            self._broken(f"{self._name_of(peer)} {lost.reason}.")
        except Exception as error:
            self._broken(f"the link with {self._name_of(peer)} broke: {error}")


def _own(tensor: torch.Tensor) -> torch.Tensor:
    """As if it had come from elsewhere: a leaf, of which nobody knows how it was computed."""
    return tensor.detach().requires_grad_(tensor.requires_grad)
