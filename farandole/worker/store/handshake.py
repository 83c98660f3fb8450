"""How a connection between hosts begins: both ends prove that they hold the job's token.

    client ── "FdSt", version, 16 random bytes ───────────▶ server
    client ◀── 16 random bytes, HMAC of both as server ──── server
    client ── HMAC of both as client ─────────────────────▶ server

The token itself is never sent, and the random bytes make an old conversation useless. Each
direction then has a key of its own, and every message ends with a tag: the first 16 bytes of the
HMAC-SHA256 of its number and its bytes. So nothing can be altered, repeated or slipped in on the
way. It can be read: nothing is encrypted.
"""

from __future__ import annotations

import hmac
import secrets
import struct
from typing import Final

from farandole.worker.store.protocol import ProtocolError

_MAGIC: Final = b"FdSt\x01"  # with the version of everything that follows
_RANDOM_BYTES: Final = 16
_MAC_BYTES: Final = 32
_TAG_BYTES: Final = 16
_COUNT: Final = struct.Struct("<Q")
HELLO_BYTES: Final = len(_MAGIC) + _RANDOM_BYTES
CHALLENGE_BYTES: Final = _RANDOM_BYTES + _MAC_BYTES
PROOF_BYTES: Final = _MAC_BYTES


class Tags:
    """One end of a connection: tags what it sends, checks what it receives."""

    def __init__(self, outgoing: bytes, incoming: bytes) -> None:
        self._outgoing = outgoing
        self._incoming = incoming
        self._sent = 0
        self._received = 0

    def seal(self, message: bytes) -> bytes:
        number = _COUNT.pack(self._sent)
        self._sent += 1
        return message + hmac.digest(self._outgoing, number + message, "sha256")[:_TAG_BYTES]

    def open(self, sealed: bytes) -> bytes:
        """Raises `ProtocolError` for what the other end did not send just now."""
        message, tag = sealed[:-_TAG_BYTES], sealed[-_TAG_BYTES:]
        number = _COUNT.pack(self._received)
        wanted = hmac.digest(self._incoming, number + message, "sha256")[:_TAG_BYTES]
        if not hmac.compare_digest(tag, wanted):
            raise ProtocolError("a message whose tag is wrong")
        self._received += 1
        return message


class ClientGreeting:
    """`hello`, then `answer` what the server says to it."""

    def __init__(self, token: bytes) -> None:
        self._token = token
        self._random = secrets.token_bytes(_RANDOM_BYTES)
        self.hello = _MAGIC + self._random

    def answer(self, challenge: bytes) -> tuple[bytes, Tags]:
        """What to send back, and the tags for all that follows. Raises `ProtocolError`."""
        both = self._random + challenge[:_RANDOM_BYTES]
        if not hmac.compare_digest(challenge[_RANDOM_BYTES:], _mac(self._token, b"server", both)):
            raise ProtocolError("whoever answers does not hold this job's token")
        tags = Tags(_mac(self._token, b"to server", both), _mac(self._token, b"to client", both))
        return _mac(self._token, b"client", both), tags


class ServerGreeting:
    """`challenge` whoever says hello, then `check` the proof."""

    def __init__(self, token: bytes) -> None:
        self._token = token
        self._both = b""

    def challenge(self, hello: bytes) -> bytes:
        """Raises `ProtocolError` for what is no hello."""
        if not hello.startswith(_MAGIC):
            raise ProtocolError("no greeting of a store's client")
        random = secrets.token_bytes(_RANDOM_BYTES)
        self._both = hello[len(_MAGIC) :] + random
        return random + _mac(self._token, b"server", self._both)

    def check(self, proof: bytes) -> Tags:
        """Raises `ProtocolError` for somebody who does not hold the token."""
        if not hmac.compare_digest(proof, _mac(self._token, b"client", self._both)):
            raise ProtocolError("a client that does not hold this job's token")
        return Tags(
            _mac(self._token, b"to client", self._both), _mac(self._token, b"to server", self._both)
        )


def _mac(token: bytes, role: bytes, both: bytes) -> bytes:
    return hmac.digest(token, b"farandole store " + role + b" " + both, "sha256")
