"""How a connection begins: both ends prove that they hold the job's key, and derive its own keys.

    client ── Hello: version, 16 random bytes, its name and where its memory is ──▶ server
    client ◀── Welcome: 16 random bytes, whether it could be opened ── server

Each ends with an HMAC-SHA256 with the job's key; the Welcome's also covers the client's random
bytes, so an old one does not fit a new Hello. An old Hello can be sent again by anybody who saw it,
but that gives him a connection whose keys he does not know.
"""

from __future__ import annotations

import hmac
import json
import secrets
import struct
from collections.abc import Mapping
from dataclasses import dataclass

from farandole.errors import CommError
from farandole.server.protocol.seal import Seal

VERSION = 3  # of everything that is sent, here and in wire.py
HELLO = b"FdHi"
WELCOME = b"FdWe"
_RANDOM_BYTES = 16
_MAC_BYTES = 32
_HEAD = struct.Struct(f"<4sH{_RANDOM_BYTES}s")


class NotWelcome(CommError):  # noqa: N818  (not an error here: somebody else's message)
    """A greeting that is none. `answer` is what to tell its sender."""

    def __init__(self, reason: str, answer: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self.answer = answer


@dataclass(frozen=True, slots=True)
class Hello:
    random: bytes
    name: str  # for whoever reads the messages; nothing here depends on it
    arena: Mapping[str, object] | None  # as `Arena.describe` says it
    server: int | None = None  # the number of a server; None: of a client

    @classmethod
    def make(
        cls, name: str, arena: Mapping[str, object] | None, server: int | None = None
    ) -> Hello:
        return cls(secrets.token_bytes(_RANDOM_BYTES), name, arena, server)

    def encode(self, key: bytes) -> bytes:
        about = json.dumps({"name": self.name, "arena": self.arena, "server": self.server})
        body = _HEAD.pack(HELLO, VERSION, self.random) + about.encode()
        return body + _mac(key, body, b"")

    @classmethod
    def decode(cls, frame: bytes, key: bytes) -> Hello:
        """Raises `NotWelcome`. The version stands in the same place in all versions."""
        random, about = _open(frame, HELLO, key, b"")
        try:
            said = json.loads(about)
            name, arena, server = said["name"], said["arena"], said["server"]
        except (KeyError, TypeError, ValueError, RecursionError):
            raise NotWelcome("malformed", "no greeting") from None
        if not isinstance(name, str) or not isinstance(arena, dict | None):
            raise NotWelcome("malformed", "no greeting")
        if not isinstance(server, int | None) or isinstance(server, bool):
            raise NotWelcome("malformed", "no greeting")
        return cls(random, name, arena, server)


@dataclass(frozen=True, slots=True)
class Welcome:
    random: bytes
    unshared: str  # why the client's memory is not shared; empty: it is

    @classmethod
    def make(cls, unshared: str) -> Welcome:
        return cls(secrets.token_bytes(_RANDOM_BYTES), unshared)

    def encode(self, key: bytes, hello: Hello) -> bytes:
        body = _HEAD.pack(WELCOME, VERSION, self.random) + self.unshared.encode()
        return body + _mac(key, body, hello.random)

    @classmethod
    def decode(cls, frame: bytes, key: bytes, hello: Hello) -> Welcome:
        """Raises `NotWelcome`, also for an answer to another Hello."""
        random, about = _open(frame, WELCOME, key, hello.random)
        return cls(random, about.decode(errors="replace"))


def client_seal(key: bytes, hello: Hello, welcome: Welcome) -> Seal:
    to_server, to_client = _session_keys(key, hello, welcome)
    return Seal(outgoing=to_server, incoming=to_client)


def server_seal(key: bytes, hello: Hello, welcome: Welcome) -> Seal:
    to_server, to_client = _session_keys(key, hello, welcome)
    return Seal(outgoing=to_client, incoming=to_server)


def _session_keys(key: bytes, hello: Hello, welcome: Welcome) -> tuple[bytes, bytes]:
    randoms = hello.random + welcome.random
    # A key for each direction: with one key, a message could be sent back to its sender as if it
    # came from the other end. Both random numbers go in, so neither end alone can bring back an old
    # session's keys.
    to_server = hmac.digest(key, b"farandole to server" + randoms, "sha256")
    to_client = hmac.digest(key, b"farandole to client" + randoms, "sha256")
    return to_server, to_client


def _open(frame: bytes, magic: bytes, key: bytes, context: bytes) -> tuple[bytes, bytes]:
    """The random bytes of a greeting, and what comes after them."""
    body, mac = frame[:-_MAC_BYTES], frame[-_MAC_BYTES:]
    if len(frame) < _HEAD.size + _MAC_BYTES or not frame.startswith(magic):
        raise NotWelcome("malformed", "no greeting")
    _, version, random = _HEAD.unpack_from(body)
    if version != VERSION:
        raise NotWelcome("unknown version", f"version {VERSION}")
    if not hmac.compare_digest(mac, _mac(key, body, context)):
        raise NotWelcome("another key", "key")
    return random, body[_HEAD.size :]


def _mac(key: bytes, body: bytes, context: bytes) -> bytes:
    """`body` begins with its kind, so that one kind is never taken for another."""
    return hmac.digest(key, b"farandole greeting" + body + context, "sha256")
