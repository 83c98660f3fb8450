"""A client's end of a connection. The protocol is described in channels.py."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import zmq

from farandole.server.client.dial import Dial
from farandole.server.filters.key_cache import KeySender
from farandole.server.protocol.arena import Arena
from farandole.server.protocol.handshake import (
    VERSION,
    WELCOME,
    Hello,
    NotWelcome,
    Welcome,
    client_seal,
)
from farandole.server.protocol.messages import Message
from farandole.server.protocol.payload import Malformed
from farandole.server.protocol.seal import BadSeal, Gap, Seal
from farandole.server.protocol.sockets import (
    KIND_BYTES,
    KNOWN_KEYS_BYTES,
    PLAIN,
    PROBE,
    UNKNOWN_PEER,
    arrived,
    send,
)
from farandole.server.protocol.wire import decode, pages

_HELLO_SECONDS = 1.0
_LOOK_SECONDS = 0.2  # between two looks whether an established connection was refused anew


class Line:
    """A client's end: one server. Connects and greets without waiting for anything.

    `ready`: the server has answered. `refused`: why it has not, as far as is known. `unshared`: why
    tensors in the arena are sent after all, if they are. `sessions` counts the Welcomes: when it
    grows, what was sent before and has no answer was lost. `name` is for the server to read;
    `server` is the number of this end, where that is a server too.
    """

    def __init__(
        self,
        context: zmq.Context[Any],
        key: bytes,
        address: str,
        arena: Arena | None = None,
        *,
        name: str = "",
        server: int | None = None,
    ) -> None:
        self.address = address
        self.refused: str | None = None
        self.unshared: str | None = None
        self.sessions = 0
        self.drops: Counter[str] = Counter()
        self._key = key
        self._name, self._server = name, server
        self._arena = arena
        self.keys = KeySender(KNOWN_KEYS_BYTES)
        """Which lists of rows the server knows already."""
        self._seal: Seal | None = None
        self._queue: list[Sequence[Message]] = []
        self._looked = 0.0
        self._dial = Dial(context, key, address)
        self._is_cut_off = False
        self.socket = self._dial.socket
        self._greet()

    @property
    def ready(self) -> bool:
        return self._seal is not None

    def send(self, messages: Sequence[Message]) -> None:
        """Does not wait: until the server has answered, messages are kept here.

        Tensors of 64 KiB and more are sent from their own memory, which must not change before the
        server's answer to them.
        """
        if self._seal is None:
            self._queue.append(messages)
        else:
            arena = None if self.unshared else self._arena
            with contextlib.suppress(zmq.Again):  # refused: `receive` will see it, and greet anew
                for frames in pages(messages, arena, self.keys):
                    send(self.socket, [self._seal.sign(frames), *frames], track=False)

    def receive(self) -> list[Message]:
        """All messages that have arrived. Does not wait. Call it now and then: it greets too."""
        messages: list[Message] = []
        for frames in arrived(self.socket):
            kind = bytes(frames[0][:KIND_BYTES])
            if kind == WELCOME:
                self._take_welcome(bytes(frames[0]))
            elif kind == PLAIN:
                self._take_notice(str(frames[0][KIND_BYTES:100], "ascii", "replace"))
            elif kind != PROBE:
                messages += self._take_sealed(frames)
        self._look_after_connection()
        return messages

    def _look_after_connection(self) -> None:
        now = time.monotonic()
        if self._seal is None or now > self._looked + _LOOK_SECONDS:
            self._looked = now
            refusal = self._dial.refusal()
            if refusal is not None:
                self.refused, self._is_cut_off, self._seal = refusal, True, None
        if self._seal is None and now > self._greeted + _HELLO_SECONDS:
            if self._is_cut_off:
                self._dial.again()
                self._is_cut_off = False
            self._send_hello()  # the one before may have met a server's end

    def close(self) -> None:
        self._queue.clear()
        self._dial.close()

    def _greet(self) -> None:
        self._seal = None
        about = None if self._arena is None else self._arena.describe()
        self._hello = Hello.make(self._name, about, self._server)
        self._send_hello()

    def _send_hello(self) -> None:
        self._greeted = time.monotonic()
        with contextlib.suppress(zmq.Again):  # refused just now
            self.socket.send(self._hello.encode(self._key), zmq.NOBLOCK)

    def _take_welcome(self, frame: bytes) -> None:
        if self._seal is not None:
            return  # the answer to a Hello that was sent twice
        try:
            welcome = Welcome.decode(frame, self._key, self._hello)
        except NotWelcome as trouble:
            self.drops[trouble.reason] += 1
            self.refused = f"what answers at {self.address} does not have this job's key"
            return
        self._seal = client_seal(self._key, self._hello, welcome)
        self.unshared = welcome.unshared
        self.refused = None
        self.sessions += 1
        # The server has begun a new session and knows no list of rows. A digest that it cannot
        # resolve would end this session too.
        self.keys.forget()
        queue, self._queue = self._queue, []
        for messages in queue:
            self.send(messages)

    def _take_notice(self, notice: str) -> None:
        if notice == UNKNOWN_PEER:
            if self._seal is not None:
                self._greet()
        elif self._seal is None:
            self.refused = _explanation(self.address, notice)

    def _take_sealed(self, frames: Sequence[memoryview]) -> list[Message]:
        if self._seal is None:
            self.drops["before the Welcome"] += 1
            return []
        try:
            self._seal.check(frames[0], frames[1:])
            return decode(frames[1:], None if self.unshared else self._arena)
        except Gap as gap:
            self.drops[str(gap)] += 1
            self._greet()
        except BadSeal as bad:
            self.drops[str(bad)] += 1
        except Malformed:
            self.drops["malformed"] += 1
        return []


def _explanation(address: str, notice: str) -> str:
    if notice == "key":
        return f"the server at {address} has another job's key. Give both ends the same key file."
    if notice.startswith("version "):
        return (
            f"the server at {address} speaks {notice} of the protocol, and this is version "
            f"{VERSION}. Install the same farandole at both ends."
        )
    return f"the server at {address} says {notice!r}"
