"""One connection, as the server sees it: what has arrived, what is to be sent, and its language."""

from __future__ import annotations

import socket
from typing import Final, Protocol

from farandole.worker.store.protocol import ProtocolError
from farandole.worker.store.table import Table, Waiter

PATIENT_BYTES: Final = 64 << 10
"""What a connection may send ahead while it waits for an answer."""


class Language(Protocol):
    """How to read what a peer sends. `chunk_bytes`: how much is read from its socket at once."""

    chunk_bytes: int

    def read(self, peer: Peer) -> bool:
        """Deals with the first message in the peer's inbox; False while it is not whole.

        Raises `ProtocolError` where the connection is of no more use.
        """


class Peer:
    """Holds no more than one message that arrives, and the answers that were not sent yet."""

    __slots__ = (
        "_unfinished",
        "inbox",
        "language",
        "outbox",
        "socket",
        "table",
        "waiter",
        "writing",
    )

    def __init__(
        self,
        connection: socket.socket,
        language: Language,
        table: Table,
        unfinished: list[Peer],
    ) -> None:
        self.socket = connection
        self._unfinished = unfinished  # whom the loop must look at, because of what another did
        self.language = language
        self.table = table
        self.inbox = bytearray()
        self.outbox = bytearray()
        self.waiter: Waiter | None = None
        self.writing = False  # whether the loop waits until more can be sent

    def receive(self) -> bool:
        """Takes what has arrived. False when the peer is gone. Raises `OSError`."""
        arrived = self.socket.recv(self.language.chunk_bytes)
        self.inbox += arrived
        return bool(arrived)

    def read(self) -> None:
        """Deals with all that has arrived, unless answers wait to be sent. Raises like `Language`.

        One that does not read its answers is not listened to: what it makes us hold is bounded.
        """
        while self.inbox and not self.outbox and self.language.read(self):
            pass
        if self.waiter is not None and len(self.inbox) > PATIENT_BYTES:
            raise ProtocolError("more requests before the answer to one that waits")

    def send(self, answer: bytes) -> None:
        """As much as the socket takes now; the loop sends the rest."""
        if not self.outbox:
            try:
                answer = answer[self.socket.send(answer) :]
            except BlockingIOError:
                pass
            except OSError:  # gone: the loop finds out when it reads
                return
        if answer:
            self.outbox += answer
        if answer or self.inbox:
            self._unfinished.append(self)

    def send_rest(self) -> None:
        """Raises `OSError`."""
        del self.outbox[: self.socket.send(self.outbox)]

    def forget_wait(self) -> None:
        if self.waiter is not None:
            self.table.forget(self.waiter)
            self.waiter = None
