"""How long a message takes between two hosts, and how many bytes pass in a second: plain TCP.

    connector                                       listener, at an address of its interface
      greeting: both prove that they hold the token
      1 byte  ─────────────▶  1 byte back           × 20, the median
      frames for half a second  ───────────▶        how many bytes a second arrived
      ◀───────────  frames for half a second

What is sent is zeros, and what arrives is thrown away. Both ends limit time and bytes. The token
comes by another way (standard input of `probe`), is used for one test, and is never sent itself.
"""

from __future__ import annotations

import contextlib
import socket
import statistics
import struct
import threading
import time
from dataclasses import dataclass
from types import TracebackType

from farandole.worker.store.handshake import (
    CHALLENGE_BYTES,
    HELLO_BYTES,
    PROOF_BYTES,
    ClientGreeting,
    ServerGreeting,
)
from farandole.worker.store.protocol import ProtocolError

_ROUNDS = 20
_POUR_SECONDS = 0.5
_MOST_BYTES = 2**30
_CHUNK_BYTES = 2**18
_HEADER = struct.Struct(">I")
_RATE = struct.Struct(">d")
_PING, _POUR = b"p", b"b"
_TEST_SECONDS = 60.0
_CONNECT_SECONDS = 10.0


@dataclass(frozen=True)
class LinkFigures:
    """`latency_seconds` is for one way. `to` is towards the listener, `back` from it."""

    latency_seconds: float
    to_bytes_per_second: float | None = None
    back_bytes_per_second: float | None = None


class _Wire:
    """A socket whose every operation ends by a deadline."""

    def __init__(self, connection: socket.socket, seconds: float) -> None:
        self._socket = connection
        self._deadline = time.monotonic() + seconds
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, data: bytes) -> None:
        self._limit()
        self._socket.sendall(data)

    def receive(self, count: int) -> bytes:
        parts: list[bytes] = []
        while count:
            self._limit()
            part = self._socket.recv(min(count, _CHUNK_BYTES))
            if not part:
                raise ConnectionResetError("the other end has closed the connection")
            parts.append(part)
            count -= len(part)
        return b"".join(parts)

    def _limit(self) -> None:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("the test took too long")
        self._socket.settimeout(left)


def measure(address: str, port: int, token: bytes, *, bandwidth: bool) -> LinkFigures:
    """Tests the link to a `Listener`. Raises `OSError` or `ProtocolError`."""
    with socket.create_connection((address, port), _CONNECT_SECONDS) as connection:
        wire = _Wire(connection, _TEST_SECONDS)
        greeting = ClientGreeting(token)
        wire.send(greeting.hello)
        proof, _ = greeting.answer(wire.receive(CHALLENGE_BYTES))
        wire.send(proof)
        trips = []
        for _ in range(_ROUNDS):
            begin = time.perf_counter()
            wire.send(_PING)
            if wire.receive(1) != _PING:
                raise ProtocolError("another answer than the one to a ping")
            trips.append(time.perf_counter() - begin)
        latency = statistics.median(trips) / 2
        if not bandwidth:
            return LinkFigures(latency)
        wire.send(_POUR)
        _pour(wire)
        (there,) = _RATE.unpack(wire.receive(_RATE.size))
        return LinkFigures(latency, there, _drain(wire))


def _pour(wire: _Wire) -> None:
    chunk = bytes(_CHUNK_BYTES)
    frame = _HEADER.pack(len(chunk)) + chunk
    sent, deadline = 0, time.monotonic() + _POUR_SECONDS
    while time.monotonic() < deadline and sent < _MOST_BYTES:
        wire.send(frame)
        sent += len(frame)
    wire.send(_HEADER.pack(0))


def _drain(wire: _Wire) -> float:
    """Bytes a second, without the first quarter, in which TCP finds its rate."""
    marks: list[tuple[float, int]] = []
    total = 0
    while True:
        (length,) = _HEADER.unpack(wire.receive(_HEADER.size))
        if length == 0:
            break
        if length > _CHUNK_BYTES or total > _MOST_BYTES:
            raise ProtocolError(f"a frame of {length} bytes after {total}")
        wire.receive(length)
        total += length
        marks.append((time.perf_counter(), total))
    if len(marks) < 2:
        raise ProtocolError("too few frames to tell a rate")
    begin = next(mark for mark in marks if mark[1] >= total / 4)
    end = marks[-1]
    if begin is end:
        begin = marks[0]
    return (end[1] - begin[1]) / max(end[0] - begin[0], 1e-9)


class Listener:
    """Answers `measure` at one address, for those that hold the token, until it is closed.

    One after the other: two tests at once would share the link. Raises `OSError` where it cannot
    listen.
    """

    def __init__(self, address: str, token: bytes) -> None:
        self._token = token
        self._socket = socket.create_server((address, 0), backlog=64)
        self.address, self.port = address, int(self._socket.getsockname()[1])
        self._thread = threading.Thread(target=self._serve, name="link test", daemon=True)
        self._thread.start()

    def __enter__(self) -> Listener:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # which ends `accept`
        self._socket.close()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:  # it was closed
                return
            with connection, contextlib.suppress(OSError, ProtocolError):
                self._answer(connection)

    def _answer(self, connection: socket.socket) -> None:
        # A stranger who sends nothing must not hold up the others for long.
        wire = _Wire(connection, _CONNECT_SECONDS)
        greeting = ServerGreeting(self._token)
        wire.send(greeting.challenge(wire.receive(HELLO_BYTES)))
        greeting.check(wire.receive(PROOF_BYTES))
        wire = _Wire(connection, _TEST_SECONDS)
        while (kind := wire.receive(1)) == _PING:
            wire.send(_PING)
        if kind == _POUR:
            wire.send(_RATE.pack(_drain(wire)))
            _pour(wire)
            wire.receive(1)  # until the other end has everything, and closes
