"""Messages between ranks, each known by its label, sent and received behind the caller's back.

A pipeline's ranks do not call collectives together: each goes through a list of its own, and what
it needs comes when it comes. So each link between two ranks, in each direction, has a thread on
both ends. The sender's works off what was posted; the receiver's fetches as many messages as were
said to come, in the order they were sent, and files each under its label.

    rank 0   post(1, F0) post(1, F1) …            take(B0)
                │                                    ▲
    thread      ╰─▶ header, tensors ─▶ thread        │
    rank 1                               ╰─▶ filed: take(F0) … post(0, B0)

A header can also say that its sender has failed, and why: then whoever waits here is woken with
that reason, passes it on to its own peers, and so all ranks end with the same words and nobody
hangs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Hashable
from functools import partial
from typing import Any

import torch

from farandole.comm.group import Group
from farandole.comm.parcel import Description, describe
from farandole.comm.queue import Queue
from farandole.comm.tensors import flat_view
from farandole.comm.transport import PeerLost, Transport
from farandole.errors import CommError

Label = tuple[int, int, int, int]
"""What a message is, in small numbers."""
_NO_LABEL = (0, 0, 0, 0)
_FAILED = -1
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
        self._device = device
        self._changed = threading.Condition()
        self._arrived: dict[Label, Any] = {}
        self._failure: str | None = None
        self._told = False
        self._outgoing: dict[int, _Sender] = {}
        self._incoming: dict[int, _Receiver] = {}
        # In one order on all ranks, so that no two wait for each other in a circle.
        for source, to in sorted(set(routes)):
            if self.rank not in (source, to) or source == to:
                continue
            transport = group.transport.channel([source, to])
            if self.rank == source:
                self._outgoing[to] = _Sender(transport, group)
            else:
                self._incoming[source] = _Receiver(transport, group, device)

    def post(self, to: int, label: Label, value: Any) -> None:
        """Sends `value` and returns at once. Its tensors must not be changed any more.

        Raises `UserError` for what cannot travel. What goes wrong on the way is raised by `take`.
        """
        description, tensors = describe(value)
        if to == self.rank:
            self._file(label, description.fill([_own(tensor) for tensor in tensors]))
            return
        sender = self._outgoing[to]
        sender.number(description)  # or says here what is wrong with it
        flats = [flat_view(tensor) for tensor in tensors]
        work = partial(sender.send, label, description, flats)
        sender.queue.start(partial(self._guarded, to, work))

    def expect(self, source: int, count: int = 1) -> None:
        """So many messages more will come from there."""
        if source == self.rank:
            return
        receiver = self._incoming[source]
        for _ in range(count):
            work = partial(self._receive, receiver)
            receiver.queue.start(partial(self._guarded, source, work))

    def take(self, label: Label) -> Any:
        """Waits for the message with this label. Tensors that can have a gradient are leaves.

        Raises `CommError` when a rank has died, took too long or has said that it failed.
        """
        with self._group.meter.waiting(), self._changed:
            # No time limit here: what is expected arrives or fails within the transport's own.
            self._changed.wait_for(lambda: label in self._arrived or self._failure is not None)
            if label in self._arrived:
                return self._arrived.pop(label)
            raise CommError(self._failure)

    def fail(self, reason: str) -> None:
        """Tells all peers, once, that nothing more will come from here, and why."""
        with self._changed:
            self._failure = self._failure or reason
            if self._told:
                return
            self._told = True
            self._changed.notify_all()
        for to, sender in self._outgoing.items():
            sender.queue.start(partial(self._guarded, to, partial(sender.fail, reason)))

    def settle(self, seconds: float) -> None:
        """Waits until everything posted is on its way, but no longer than so many seconds."""
        for sender in self._outgoing.values():
            sender.queue.settle(seconds)

    @property
    def failure(self) -> str | None:
        return self._failure

    def close(self) -> None:
        links: list[_Sender | _Receiver] = [*self._outgoing.values(), *self._incoming.values()]
        for link in links:
            link.queue.settle(_PATIENCE_SECONDS)
            link.transport.close()
        self._outgoing.clear()
        self._incoming.clear()

    def _receive(self, receiver: _Receiver) -> None:
        if self._failure is not None:
            return
        label, value = receiver.receive()
        if label is None:
            self._broken(value)
        else:
            self._file(label, value)

    def _file(self, label: Label, value: Any) -> None:
        with self._changed:
            self._arrived[label] = value
            self._changed.notify_all()

    def _broken(self, reason: str) -> None:
        with self._changed:
            self._failure = self._failure or reason
            self._changed.notify_all()

    def _guarded(self, peer: int, work: Callable[[], None]) -> None:
        try:
            work()
        except PeerLost as lost:
            self._broken(f"{self._name_of(peer)} {lost.reason}.")
        except Exception as error:
            self._broken(f"the link with {self._name_of(peer)} broke: {error}")


class _Sender:
    def __init__(self, transport: Transport, group: Group) -> None:
        self.transport = transport
        self.queue = Queue(group.meter)
        self._group = group
        self._numbers: dict[Hashable, tuple[int, bytes]] = {}
        self._sent = 0  # descriptions that the other end knows

    def number(self, description: Description) -> tuple[int, bytes]:
        known = self._numbers.get(description)
        if known is None:
            known = (len(self._numbers), description.text())
            self._numbers[description] = known
        return known

    def send(self, label: Label, description: Description, flats: list[torch.Tensor]) -> None:
        number, text = self.number(description)
        news = text if number == self._sent else b""
        self._sent += bool(news)
        sent_bytes = sum(flat.nbytes for flat in flats)
        messages = [_header(number, len(news), label), *([_bytes(news)] if news else [])]
        with self._group.trace.span("send", "comm", bytes=sent_bytes, by=self.transport.name):
            self._send([*messages, *(flat for flat in flats if flat.numel())])
        self._group.meter.add_bytes(sent_bytes)

    def fail(self, reason: str) -> None:
        text = reason.encode()
        self._send([_header(_FAILED, len(text), _NO_LABEL), _bytes(text)])

    def _send(self, messages: list[torch.Tensor]) -> None:
        self.transport.exchange([(1, message) for message in messages], [])


class _Receiver:
    def __init__(self, transport: Transport, group: Group, device: torch.device) -> None:
        self.transport = transport
        self.queue = Queue(group.meter)
        self._group = group
        self._device = device
        self._known: list[Description] = []

    def receive(self) -> tuple[Label | None, Any]:
        """The next message; without a label it is why there will be none any more."""
        header = self._fetch(torch.empty(2 + len(_NO_LABEL), dtype=torch.int64))
        number, text_bytes, kind, *rest = header.tolist()
        text = b""
        if text_bytes:
            text = self._fetch(torch.empty(text_bytes, dtype=torch.uint8)).numpy().tobytes()
        if number == _FAILED:
            return None, text.decode(errors="replace")
        if text:
            self._known.append(Description.read(text))
        description = self._known[number]
        tensors = [
            torch.empty(slot.shape, dtype=slot.dtype, device=self._device)
            for slot in description.slots
        ]
        wanted = [(0, flat_view(tensor)) for tensor in tensors if tensor.numel()]
        if wanted:
            received_bytes = sum(flat.nbytes for _, flat in wanted)
            with self._group.trace.span(
                "receive", "comm", bytes=received_bytes, by=self.transport.name
            ):
                self.transport.exchange([], wanted)
        for tensor, slot in zip(tensors, description.slots, strict=True):
            tensor.requires_grad_(slot.differentiable)
        return (kind, *rest), description.fill(tensors)

    def _fetch(self, into: torch.Tensor) -> torch.Tensor:
        self.transport.exchange([], [(0, into)])
        return into


def _header(number: int, text_bytes: int, label: Label) -> torch.Tensor:
    return torch.tensor([number, text_bytes, *label], dtype=torch.int64)


def _bytes(text: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def _own(tensor: torch.Tensor) -> torch.Tensor:
    """As if it had come from elsewhere: a leaf, of which nobody knows how it was computed."""
    return tensor.detach().requires_grad_(tensor.requires_grad)
