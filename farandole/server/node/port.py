"""A server's end of its connections. The protocol is described in channels.py."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import zmq

from farandole.errors import UserError
from farandole.server.filters.key_cache import KeyReceiver
from farandole.server.node.admission import Admission
from farandole.server.protocol.arena import Arena, NotShared
from farandole.server.protocol.handshake import HELLO, Hello, NotWelcome, Welcome, server_seal
from farandole.server.protocol.messages import Message
from farandole.server.protocol.payload import Malformed, UnknownKeys
from farandole.server.protocol.seal import BadSeal, Gap, Seal
from farandole.server.protocol.sockets import (
    KIND_BYTES,
    KNOWN_KEYS_BYTES,
    PLAIN,
    PROBE,
    UNKNOWN_PEER,
    arrived,
    open_socket,
    send,
)
from farandole.server.protocol.wire import decode, pages

_KEPT_PEERS = 1024


@dataclass(frozen=True, slots=True)
class _Session:
    hello: Hello
    welcome: bytes
    seal: Seal
    arena: Arena | None
    keys: KeyReceiver


class Port:
    """A server's end: many peers. Listens where `bind` says and nowhere else.

    Raises `UserError` where it cannot listen. A peer is a zmq routing id: one connection of one
    `Line`, which has been let in (admission.py).
    """

    def __init__(self, key: bytes, bind: str = "tcp://127.0.0.1:*") -> None:
        self._drops: Counter[str] = Counter()
        self._key = key
        # A context of its own: in each there can be one who says whom to let in.
        self._context: zmq.Context[Any] = zmq.Context()
        self._admission = Admission(self._context, key)
        self._sessions: dict[bytes, _Session] = {}
        self._notified: set[bytes] = set()
        self.socket = open_socket(self._context, zmq.ROUTER)
        self.socket.plain_server = True
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # says when a peer has gone
        try:
            self.socket.bind(bind)
        except zmq.ZMQError as error:
            self.close()
            raise UserError(
                f"cannot listen on {bind}: {error.strerror}. End the process that does, or name "
                "another port of this host; with * for the port, one that is free is taken."
            ) from None
        self.address = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._admission.open(self.address)

    @property
    def drops(self) -> Counter[str]:
        """What came and was thrown away, and connections that were refused, by reason."""
        return self._drops + self._admission.refused

    def count_drop(self, reason: str) -> None:
        self._drops[reason] += 1

    def receive(self) -> Iterator[tuple[bytes, list[Message]]]:
        """Everything that has arrived, by peer. Does not wait."""
        for identity, *frames in arrived(self.socket):
            peer = bytes(identity)
            kind = bytes(frames[0][:KIND_BYTES])  # zmq never delivers less than one
            if kind == HELLO and len(frames) == 1:
                self._take_hello(peer, bytes(frames[0]))
            elif peer in self._sessions:
                messages = self._take_sealed(peer, frames)
                if messages:
                    yield peer, messages
            else:
                self._drops[UNKNOWN_PEER] += 1
                self._tell(peer, UNKNOWN_PEER)

    def send(
        self, peer: bytes, messages: Sequence[Message], *, track: bool = False
    ) -> zmq.MessageTracker | None:
        """To a peer that has gone: nothing happens.

        Tensors of 64 KiB and more are sent from their own memory, which must not change until they
        are sent: the tracker says when (`done`). None: the memory is free already.
        """
        session = self._sessions.get(peer)
        if session is None:
            return None
        trackers: list[zmq.MessageTracker] = []
        try:
            for frames in pages(messages, session.arena):
                trackers += send(self.socket, [peer, session.seal.sign(frames), *frames], track)
        except zmq.ZMQError as error:
            self._forget_if_gone(peer, error)
        return zmq.MessageTracker(*trackers) if trackers else None

    def name_of(self, peer: bytes) -> str | None:
        """What its `Line` says that it is; None for one that has gone."""
        session = self._sessions.get(peer)
        return None if session is None else session.hello.name

    def server_of(self, peer: bytes) -> int | None:
        """The number of a peer that is a server; None for a client, and for one that has gone."""
        session = self._sessions.get(peer)
        return None if session is None else session.hello.server

    def close(self) -> None:
        self._sessions.clear()
        self.socket.close()
        self._context.term()

    def _take_sealed(self, peer: bytes, frames: Sequence[memoryview]) -> list[Message]:
        session = self._sessions[peer]
        try:
            session.seal.check(frames[0], frames[1:])
            return decode(frames[1:], session.arena, session.keys)
        except (Gap, UnknownKeys) as trouble:
            self._drops[str(trouble)] += 1
            del self._sessions[peer]
            self._tell(peer, UNKNOWN_PEER)
        except BadSeal as bad:
            self._drops[str(bad)] += 1
        except Malformed:
            self._drops["malformed"] += 1
        return []

    def _take_hello(self, peer: bytes, frame: bytes) -> None:
        try:
            hello = Hello.decode(frame, self._key)
        except NotWelcome as trouble:
            self._drops[trouble.reason] += 1
            self._tell(peer, trouble.answer)
            return
        known = self._sessions.get(peer)
        # Other random bytes are another session of the same connection, with other keys. The old
        # one's messages no longer have a valid seal.
        if known is None or known.hello.random != hello.random:
            self._sessions[peer] = known = self._begin(hello)
            self._notified.discard(peer)
        # The same Hello twice, from one who is impatient: the same Welcome, and the same keys.
        self._put(peer, known.welcome)
        # Now is as good a time as any to let go of those who have left, and of their memory.
        for other in list(self._sessions):
            if other != peer:
                self._put(other, PROBE)

    def _begin(self, hello: Hello) -> _Session:
        arena, unshared = None, "none was offered"
        if hello.arena is not None:
            try:
                arena, unshared = Arena.open(hello.arena, os.geteuid()), ""
            except NotShared as trouble:
                unshared = str(trouble)
        welcome = Welcome.make(unshared)
        seal = server_seal(self._key, hello, welcome)
        keys = KeyReceiver(KNOWN_KEYS_BYTES)
        return _Session(hello, welcome.encode(self._key, hello), seal, arena, keys)

    def _tell(self, peer: bytes, notice: str) -> None:
        """Once is enough: else one who never reads could fill this server's memory with answers."""
        if len(self._notified) >= _KEPT_PEERS:
            self._notified.clear()
        if peer not in self._notified:
            self._notified.add(peer)
            self._put(peer, PLAIN + notice.encode())

    def _put(self, peer: bytes, frame: bytes) -> None:
        try:
            self.socket.send_multipart([peer, frame], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            self._forget_if_gone(peer, error)

    def _forget_if_gone(self, peer: bytes, error: zmq.ZMQError) -> None:
        if error.errno != zmq.EHOSTUNREACH:
            raise error
        self._sessions.pop(peer, None)
