"""One direction of a connection between two ranks, for `Mail`: what a message looks like.

    header    number of the description, bytes of its text, whether the rest is in this frame, label
    text      of the description, the first time that it is used
    tensors   one after the other

Over a wire each of these is a message of its own, because a receiver must know how long the next
one is. In shared memory all of it is one frame in one slot if it fits, and a message costs no more
than two copies and two semaphores; the latency of that is what a pipeline waits for.
"""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch

from farandole.comm.group import Group
from farandole.comm.p2p.payload import Description
from farandole.comm.queue import Queue
from farandole.comm.streams import Ready
from farandole.comm.transports.base import Transport
from farandole.comm.transports.shm.frames import Frames

Label = tuple[int, int, int, int]
"""What a message is, in small numbers."""
_NO_LABEL = (0, 0, 0, 0)
_FAILED = -1
HEADER = struct.Struct("<7q")
_MOST_TEXT_BYTES = 2**16  # of a description; more would only be slower
_ALIGNED_BYTES = 64
SENDER, RECEIVER = 0, 1  # the ranks of a link


class Arrival(NamedTuple):
    """A message that has come, or is sure to come on the GPU: then `wait`, in the thread that uses
    it, lets the current stream wait for it. Without a label, `value` says why there will be no
    message any more."""

    label: Label | None
    value: Any
    wait: Callable[[], None]

    @classmethod
    def here(cls, label: Label, value: Any, tensors: Sequence[torch.Tensor]) -> Arrival:
        """A message of these tensors, which are there when the current stream has got so far."""
        on_gpu = any(tensor.is_cuda for tensor in tensors)
        return cls(label, value, Ready(tensors).wait if on_gpu else _nothing)

    @classmethod
    def of_failure(cls, text: bytes) -> Arrival:
        return cls(None, text.decode(errors="replace"), _nothing)


def _nothing() -> None: ...


class Sender(ABC):
    """The end that sends. Descriptions are numbered in the order in which they are first used."""

    def __init__(self, transport: Transport, group: Group) -> None:
        self.transport = transport
        self.queue = Queue(group.meter)
        self._group = group
        self._numbers: dict[Hashable, tuple[int, bytes]] = {}
        self._descriptions_sent = 0  # descriptions that the other end knows

    def number(self, description: Description) -> tuple[int, bytes]:
        known = self._numbers.get(description)
        if known is None:
            known = (len(self._numbers), description.text())
            self._numbers[description] = known
        return known

    def send(self, label: Label, number: int, text: bytes, flats: list[torch.Tensor]) -> None:
        """May wait for the other end. `number` and `text` are what `number` returned; flat tensors,
        of any kind."""
        # Messages leave in the order in which `number` was called for them. So description n is
        # first used when the other end knows exactly n, and its text goes with that message and no
        # other.
        news = text if number == self._descriptions_sent else b""
        self._descriptions_sent += bool(news)
        sent_bytes = sum(flat.nbytes for flat in flats)
        with self._group.trace.span("send", "comm", bytes=sent_bytes, by=self.transport.name):
            self._put(number, label, news, [flat for flat in flats if flat.numel()])
        self._group.meter.add_bytes(sent_bytes)

    def fail(self, reason: str) -> None:
        self._put(_FAILED, _NO_LABEL, reason.encode()[:_MOST_TEXT_BYTES], [])

    @abstractmethod
    def goes_at_once(self, flats: list[torch.Tensor]) -> bool:
        """Whether `send` would return without having waited."""

    @abstractmethod
    def _put(self, number: int, label: Label, text: bytes, flats: list[torch.Tensor]) -> None: ...


class Receiver(ABC):
    """The end that receives. `lies_ready`: there is nothing to gain by fetching ahead of use."""

    lies_ready: bool

    def __init__(self, transport: Transport, group: Group, device: torch.device) -> None:
        self.transport = transport
        self.queue = Queue(group.meter)
        self._group = group
        self._device = device
        self._known: list[Description] = []

    @abstractmethod
    def receive(self) -> Arrival:
        """The next message."""

    @staticmethod
    def is_failure(number: int) -> bool:
        return number == _FAILED

    def _described(self, number: int, text: bytes) -> Description:
        if text:
            self._known.append(Description.read(text))
        return self._known[number]

    def _empty(self, description: Description) -> list[torch.Tensor]:
        return [
            torch.empty(slot.shape, dtype=slot.dtype, device=self._device)
            for slot in description.slots
        ]

    def _filled(self, description: Description, tensors: list[torch.Tensor]) -> Any:
        for tensor, slot in zip(tensors, description.slots, strict=True):
            if slot.differentiable:
                tensor.requires_grad_()
        return description.fill(tensors)

    def _exchange(self, flats: list[torch.Tensor]) -> None:
        wanted = [(SENDER, flat) for flat in flats if flat.numel()]
        if not wanted:
            return
        received_bytes = sum(flat.nbytes for _, flat in wanted)
        with self._group.trace.span(
            "receive", "comm", bytes=received_bytes, by=self.transport.name
        ):
            self.transport.exchange([], wanted)


class WireSender(Sender):
    """Over anything that can exchange messages."""

    def goes_at_once(self, flats: list[torch.Tensor]) -> bool:
        return self.transport.never_waits and self.queue.idle

    def _put(self, number: int, label: Label, text: bytes, flats: list[torch.Tensor]) -> None:
        header = _bytes(HEADER.pack(number, len(text), 0, *label))
        words = [_bytes(text)] if text else []
        self.transport.exchange([(RECEIVER, part) for part in (header, *words, *flats)], [])


class WireReceiver(Receiver):
    """Over anything that can exchange messages."""

    @property
    def lies_ready(self) -> bool:  # type: ignore[override]
        return self.transport.never_waits

    def receive(self) -> Arrival:
        header = self._fetch(HEADER.size)
        number, text_bytes, _, *label = HEADER.unpack(header)
        text = self._fetch(text_bytes) if text_bytes else b""
        if self.is_failure(number):
            return Arrival.of_failure(text)
        description = self._described(number, text)
        tensors = self._empty(description)
        self._exchange([tensor.view(-1) for tensor in tensors])
        value = self._filled(description, tensors)
        return Arrival.here((label[0], *label[1:]), value, tensors)

    def _fetch(self, count: int) -> bytes:
        into = torch.empty(count, dtype=torch.uint8)
        self.transport.exchange([], [(SENDER, into)])
        return into.numpy().tobytes()


class FrameSender(Sender):
    """Through shared memory, one frame for one message if it fits."""

    def __init__(self, transport: Transport, group: Group, frames: Frames) -> None:
        super().__init__(transport, group)
        self._frames = frames

    def goes_at_once(self, flats: list[torch.Tensor]) -> bool:
        if not self.queue.idle:
            return False
        fits = _frame_bytes(_MOST_TEXT_BYTES, flats) <= self._frames.slot_bytes
        # The text is counted at its limit, because whether it goes along is decided when the
        # message leaves.
        return self._frames.has_room([] if fits else [_MOST_TEXT_BYTES, *_sizes(flats)])

    def _put(self, number: int, label: Label, text: bytes, flats: list[torch.Tensor]) -> None:
        fits = _frame_bytes(len(text), flats) <= self._frames.slot_bytes
        header = HEADER.pack(number, len(text), fits, *label)
        if fits:
            self._frames.put(header + text, _places(len(text), flats))
            return
        self._frames.put(header, [])
        words = [_bytes(text)] if text else []
        self.transport.exchange([(RECEIVER, part) for part in (*words, *flats)], [])


class FrameReceiver(Receiver):
    """Through shared memory."""

    lies_ready = True

    def __init__(
        self, transport: Transport, group: Group, device: torch.device, frames: Frames
    ) -> None:
        super().__init__(transport, group, device)
        self._frames = frames

    def receive(self) -> Arrival:
        frame = self._frames.get()
        number, text_bytes, whole, *rest = HEADER.unpack_from(frame.memory)
        label = (rest[0], *rest[1:])
        text = b""
        if whole and text_bytes:
            text = bytes(frame.memory[HEADER.size : HEADER.size + text_bytes])
        if not whole:
            self._frames.done()
            text = self._text(text_bytes)
        if self.is_failure(number):
            return Arrival.of_failure(text)
        description = self._described(number, text)
        tensors = self._empty(description)
        flats = [tensor.view(-1) for tensor in tensors if tensor.numel()]
        if whole:
            for flat, (begin, _) in zip(flats, _places(text_bytes, flats), strict=True):
                flat.view(torch.uint8).copy_(frame.tensor[begin : begin + flat.nbytes])
            # The slot is freed before the rest is fetched: the sender's `exchange` may need it.
            self._frames.done()
        else:
            self._exchange(flats)
        return Arrival.here(label, self._filled(description, tensors), tensors)

    def _text(self, count: int) -> bytes:
        if not count:
            return b""
        into = torch.empty(count, dtype=torch.uint8)
        self.transport.exchange([], [(SENDER, into)])
        return into.numpy().tobytes()


def _places(text_bytes: int, flats: list[torch.Tensor]) -> list[tuple[int, torch.Tensor]]:
    """Where each tensor lies in a frame."""
    begin, places = HEADER.size + text_bytes, []
    for flat in flats:
        begin = -(-begin // _ALIGNED_BYTES) * _ALIGNED_BYTES
        places.append((begin, flat))
        begin += flat.nbytes
    return places


def _frame_bytes(text_bytes: int, flats: list[torch.Tensor]) -> int:
    padding = _ALIGNED_BYTES * len(flats)
    return HEADER.size + text_bytes + padding + sum(_sizes(flats))


def _sizes(flats: list[torch.Tensor]) -> list[int]:
    return [flat.nbytes for flat in flats]


def _bytes(text: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)
