"""One connection of a client to a store's server: send a request, wait for its answer. No torch."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from pathlib import Path

from farandole.worker.store import protocol
from farandole.worker.store.handshake import CHALLENGE_BYTES, ClientGreeting, Tags
from farandole.worker.store.unix_path import short_path

_CHUNK_BYTES = 256 << 10
_RETRY_SECONDS = 0.02


class StoreConnection:
    """Used by one thread at a time. After an error it is of no more use."""

    def __init__(self, connection: socket.socket, tags: Tags | None = None) -> None:
        self._socket = connection
        self._tags = tags
        self._limit: float | None = None  # as the socket was told last

    def ask(self, what: int, fields: Sequence[bytes], seconds: float) -> tuple[int, list[bytes]]:
        """The status and the fields of the answer.

        Raises `TimeoutError` when it takes longer than that, `OSError` when the server is gone, and
        `ProtocolError` when what answers is none.
        """
        message = protocol.pack(what, fields)
        if self._tags is not None:
            message = self._tags.seal(message)
        if len(message) > protocol.MAX_MESSAGE_BYTES:
            limit = protocol.MAX_MESSAGE_BYTES
            raise protocol.RefusedError(
                f"{len(message)} bytes in one request; the limit is {limit}"
            )
        self._limit_to(seconds)
        frame = protocol.framed(message)
        # A plain write, because the socket's own would first ask whether it can, and it can.
        sent = self._write(frame)
        if sent < len(frame):
            self._socket.sendall(frame[sent:])
        answer = self._receive(seconds)
        if self._tags is not None:
            answer = self._tags.open(answer)
        return protocol.unpack(answer)

    def _receive(self, seconds: float) -> bytes:
        inbox = bytearray(self._some())
        answer = protocol.take_message(inbox)
        if answer is None:  # it comes in pieces
            deadline = time.monotonic() + seconds
            while answer is None:
                self._limit_to(max(deadline - time.monotonic(), 0.001))
                inbox += self._some()
                answer = protocol.take_message(inbox)
        if inbox:
            raise protocol.ProtocolError("more than one answer to a request")
        return answer

    def _limit_to(self, seconds: float) -> None:
        if seconds != self._limit:  # each time is a call of the system
            self._socket.settimeout(seconds)
            self._limit = seconds

    def _write(self, frame: bytes) -> int:
        try:
            return os.write(self._socket.fileno(), frame)
        except BlockingIOError:
            return 0

    def _some(self) -> bytes:
        arrived = self._socket.recv(_CHUNK_BYTES)
        if not arrived:
            raise ConnectionResetError("the store's server has closed the connection")
        return arrived

    def close(self) -> None:
        self._socket.close()


def connect_to_path(path: Path, seconds: float) -> StoreConnection:
    """Raises `OSError`: `TimeoutError` where the server takes that long to accept."""
    deadline = time.monotonic() + seconds
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.settimeout(max(deadline - time.monotonic(), 0.001))
            with short_path(path) as address:
                connection.connect(address)
            return StoreConnection(connection)
        except BlockingIOError:  # too many at once
            connection.close()
            if time.monotonic() > deadline:
                raise TimeoutError(f"no answer at {path}") from None
            time.sleep(_RETRY_SECONDS)
        except BaseException:
            connection.close()
            raise


def connect_to_host(host: str, port: int, token: bytes, seconds: float) -> StoreConnection:
    """Raises `OSError`, and `ProtocolError` for a server that does not hold the token."""
    connection = socket.create_connection((host, port), seconds)
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        greeting = ClientGreeting(token)
        connection.sendall(greeting.hello)
        challenge = b""
        while len(challenge) < CHALLENGE_BYTES:
            arrived = connection.recv(CHALLENGE_BYTES - len(challenge))
            if not arrived:
                raise ConnectionResetError("the store's server has closed the connection")
            challenge += arrived
        proof, tags = greeting.answer(challenge)
        connection.sendall(proof)
        return StoreConnection(connection, tags)
    except BaseException:
        connection.close()
        raise
