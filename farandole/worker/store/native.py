"""The server's side of our own language (protocol.py), and of the greeting before it."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence

from farandole.worker.store import protocol
from farandole.worker.store.handshake import HELLO_BYTES, PROOF_BYTES, ServerGreeting, Tags
from farandole.worker.store.peer import Peer
from farandole.worker.store.protocol import NUMBER, ProtocolError, RefusedError

_CHUNK_BYTES = 256 << 10
_GREETING_CHUNK_BYTES = 64


class Native:
    """Of one connection. `tags` where it leaves the host."""

    chunk_bytes = _CHUNK_BYTES

    def __init__(self, tags: Tags | None = None) -> None:
        self._tags = tags

    def read(self, peer: Peer) -> bool:
        # The next request stays in the inbox while the last one waits: answers carry no number, and
        # must come in the order of the requests.
        if peer.waiter is not None:
            return False
        message = protocol.take_message(peer.inbox)
        if message is None:
            return False
        if self._tags is not None:
            message = self._tags.open(message)
        operation, fields = protocol.unpack(message)
        try:
            answer = self._do(peer, operation, fields)
        except RefusedError as refusal:
            self._answer(peer, protocol.REFUSED, (str(refusal).encode(),))
        except (ValueError, struct.error):
            raise ProtocolError(f"operation {operation} with fields that do not fit") from None
        else:
            if answer is not None:
                self._answer(peer, protocol.DONE, answer)
        return True

    def _answer(self, peer: Peer, status: int, fields: Sequence[bytes]) -> None:
        message = protocol.pack(status, fields)
        if self._tags is not None:
            message = self._tags.seal(message)
        peer.send(protocol.framed(message))

    def _do(self, peer: Peer, operation: int, fields: list[bytes]) -> Sequence[bytes] | None:
        """The answer's fields; None where it comes later, or was sent already."""
        table = peer.table
        if operation == protocol.SET:
            key, value = fields
            table.set(key, value)
        elif operation == protocol.GET:
            (key,) = fields
            return self._values(peer, fields)
        elif operation == protocol.ADD:
            key, amount = fields
            return (NUMBER.pack(table.add(key, *NUMBER.unpack(amount))),)
        elif operation == protocol.CHECK:
            return (b"\1" if table.has(fields) else b"\0",)
        elif operation == protocol.WAIT:
            return self._when_there(peer, fields, lambda: ())
        elif operation == protocol.MULTI_GET:
            return self._values(peer, fields)
        elif operation == protocol.COMPARE_SET:
            key, expected, desired = fields
            return (table.compare_set(key, expected, desired),)
        elif operation == protocol.DELETE:
            (key,) = fields
            return (b"\1" if table.delete(key) else b"\0",)
        elif operation == protocol.COUNT:
            return (NUMBER.pack(len(table)),)
        elif operation == protocol.APPEND:
            key, value = fields
            table.append(key, value)
        elif operation == protocol.MULTI_SET:
            for key, value in zip(fields[::2], fields[1::2], strict=True):
                table.set(key, value)
        elif operation == protocol.LIST:
            return table.keys()
        else:
            return self._do_queue(peer, operation, fields)
        return ()

    def _do_queue(self, peer: Peer, operation: int, fields: list[bytes]) -> Sequence[bytes] | None:
        table = peer.table
        if operation == protocol.PUSH:
            key, value = fields
            table.push(key, value)
            return ()
        if operation == protocol.QUEUE_LENGTH:
            (key,) = fields
            return (NUMBER.pack(table.queue_length(key)),)
        if operation != protocol.POP:
            raise ProtocolError(f"unknown operation {operation}")
        key, block = fields
        found = table.pop(key)
        if found is not None:
            return (found,)
        if block == b"\0":
            self._answer(peer, protocol.EMPTY, ())
            return None
        return self._when_there(peer, [key], lambda: self._do_queue(peer, operation, fields))

    def _values(self, peer: Peer, keys: Sequence[bytes]) -> Sequence[bytes] | None:
        """When all are there at once: some may be deleted before the last comes."""
        values = [peer.table.get(key) for key in keys]
        found = [value for value in values if value is not None]
        if len(found) == len(values):
            return found
        missing = [key for key, value in zip(keys, values, strict=True) if value is None]
        return self._when_there(peer, missing, lambda: self._values(peer, keys))

    def _when_there(
        self, peer: Peer, keys: Sequence[bytes], then: Callable[[], Sequence[bytes] | None]
    ) -> Sequence[bytes] | None:
        """What `then` returns, now or, as an answer, later."""

        def ready() -> None:
            peer.waiter = None
            answer = then()
            if answer is not None:
                self._answer(peer, protocol.DONE, answer)

        peer.waiter = peer.table.wait(keys, ready)
        return then() if peer.waiter is None else None


class Greeting:
    """Before a connection from elsewhere is known: holds a few bytes, then becomes `Native`.

    `other` is asked what to make of a peer that says no hello of ours.
    """

    chunk_bytes = _GREETING_CHUNK_BYTES

    def __init__(
        self, token: bytes | None, welcome: Callable[[Peer], None], other: Callable[[Peer], None]
    ) -> None:
        self._greeting = None if token is None else ServerGreeting(token)
        self._challenged = False
        self._welcome = welcome
        self._other = other

    def read(self, peer: Peer) -> bool:
        """Raises `ProtocolError`."""
        if self._greeting is None or (not self._challenged and peer.inbox[:1] != b"F"):
            self._other(peer)
            return True
        wanted = PROOF_BYTES if self._challenged else HELLO_BYTES
        if len(peer.inbox) < wanted:
            return False
        said = bytes(peer.inbox[:wanted])
        del peer.inbox[:wanted]
        if self._challenged:
            peer.language = Native(self._greeting.check(said))
            self._welcome(peer)
        else:
            peer.send(self._greeting.challenge(said))
            self._challenged = True
        return True
