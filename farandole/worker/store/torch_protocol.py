"""The server's side of what PyTorch's TCPStore clients send, for scripts that call
`torch.distributed.init_process_group()` themselves.

    connection   VALIDATE u8, magic u32, then queries
    query        type u8 │ what belongs to it
    text         length u64 │ bytes                 all numbers in the machine's own order

It is PyTorch's internal format, unchanged from 2.4 to 2.13 except for new queries at the end; a
query that is not known ends the connection, and its client raises DistNetworkError.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

from farandole.worker.store.peer import Peer
from farandole.worker.store.protocol import MAX_MESSAGE_BYTES, ProtocolError, RefusedError

_MAGIC = struct.pack("=BI", 0, 0x3C85F7CE)
_NUMBER = struct.Struct("=q")
_LENGTH = struct.Struct("=Q")
_MAX_KEYS = 128 * 1024
_STOP_WAITING, _WAIT_CANCELLED = b"\0", b"\1"
_READY, _NOT_READY = b"\0", b"\1"
_CANCEL_WAIT = 12


class _Incomplete(Exception):  # noqa: N818  (more is to arrive)
    """The query is not whole."""


class _Reader:
    """Reads a query from the start of an inbox, and says how long it was."""

    def __init__(self, inbox: bytearray) -> None:
        self._inbox = inbox
        self.position = 0

    def take(self, count: int) -> bytes:
        end = self.position + count
        if end > MAX_MESSAGE_BYTES:
            raise ProtocolError(f"a query of {end} bytes; the limit is {MAX_MESSAGE_BYTES}")
        if end > len(self._inbox):
            raise _Incomplete
        found = bytes(self._inbox[self.position : end])
        self.position = end
        return found

    def number(self) -> int:
        return int(_NUMBER.unpack(self.take(_NUMBER.size))[0])

    def count(self) -> int:
        found = int(_LENGTH.unpack(self.take(_LENGTH.size))[0])
        if found > _MAX_KEYS:
            raise ProtocolError(f"{found} keys in one query; the limit is {_MAX_KEYS}")
        return found

    def text(self) -> bytes:
        return self.take(_LENGTH.unpack(self.take(_LENGTH.size))[0])

    def texts(self) -> list[bytes]:
        return [self.text() for _ in range(self.count())]


class TorchProtocol:
    """Of one connection, which was let in already."""

    chunk_bytes = 256 << 10

    def __init__(self) -> None:
        self._validated = False

    def read(self, peer: Peer) -> bool:
        inbox = peer.inbox
        if not self._validated:
            if not inbox.startswith(_MAGIC):
                if len(inbox) >= len(_MAGIC) or not _MAGIC.startswith(inbox):
                    raise ProtocolError("neither our client nor PyTorch's")
                return False
            del inbox[: len(_MAGIC)]
            self._validated = True
            return True
        kind = inbox[0]
        if peer.waiter is not None and kind != _CANCEL_WAIT:
            return False
        if kind not in _QUERIES:
            raise ProtocolError(f"a query of PyTorch's that is not known: {kind}")
        reader = _Reader(inbox)
        reader.take(1)
        try:
            done = _QUERIES[kind](peer, reader)
        except _Incomplete:
            return False
        except RefusedError as refusal:  # this language has no word for it
            raise ProtocolError(str(refusal)) from None
        del inbox[: reader.position]
        if done:
            peer.send(done)
        return True


def _framed(value: bytes) -> bytes:
    return _LENGTH.pack(len(value)) + value


def _ping(peer: Peer, query: _Reader) -> bytes:
    return query.take(4)


def _set(peer: Peer, query: _Reader) -> bytes:
    key, value = query.text(), query.text()
    peer.table.set(key, value)
    return b""


def _compare_set(peer: Peer, query: _Reader) -> bytes:
    key, expected, desired = query.text(), query.text(), query.text()
    return _framed(peer.table.compare_set(key, expected, desired))


def _get(peer: Peer, query: _Reader) -> bytes:
    return _framed(peer.table.get(query.text()) or b"")


def _add(peer: Peer, query: _Reader) -> bytes:
    key, amount = query.text(), query.number()
    return _NUMBER.pack(peer.table.add(key, amount))


def _check(peer: Peer, query: _Reader) -> bytes:
    return _READY if peer.table.has(query.texts()) else _NOT_READY


def _wait(peer: Peer, query: _Reader) -> bytes:
    return _wait_for(peer, query.texts())


def _wait_for(peer: Peer, keys: list[bytes]) -> bytes:
    def ready() -> None:
        peer.waiter = None
        peer.send(_STOP_WAITING)

    peer.waiter = peer.table.wait(keys, ready)
    return _STOP_WAITING if peer.waiter is None else b""


def _cancel_wait(peer: Peer, query: _Reader) -> bytes:
    peer.forget_wait()
    return _WAIT_CANCELLED


def _count(peer: Peer, query: _Reader) -> bytes:
    return _NUMBER.pack(len(peer.table))


def _delete(peer: Peer, query: _Reader) -> bytes:
    return _NUMBER.pack(peer.table.delete(query.text()))


def _append(peer: Peer, query: _Reader) -> bytes:
    key, value = query.text(), query.text()
    peer.table.append(key, value)
    return b""


def _multi_get(peer: Peer, query: _Reader) -> bytes:
    return b"".join(_framed(peer.table.get(key) or b"") for key in query.texts())


def _multi_set(peer: Peer, query: _Reader) -> bytes:
    pairs = [(query.text(), query.text()) for _ in range(query.count())]
    for key, value in pairs:
        peer.table.set(key, value)
    return b""


def _push(peer: Peer, query: _Reader) -> bytes:
    key, value = query.text(), query.text()
    peer.table.push(key, value)
    return b""


def _pop(peer: Peer, query: _Reader) -> bytes:
    key = query.text()
    length = _NUMBER.pack(peer.table.queue_length(key))
    value = peer.table.pop(key)
    return length if value is None else length + _framed(value)


def _queue_length(peer: Peer, query: _Reader) -> bytes:
    return _NUMBER.pack(peer.table.queue_length(query.text()))


def _list(peer: Peer, query: _Reader) -> bytes:
    keys = peer.table.keys()
    return _LENGTH.pack(len(keys)) + b"".join(map(_framed, keys))


def _barrier(peer: Peer, query: _Reader) -> bytes:
    """Answered when as many have come as are to come. The last of them says so in the table."""
    key, size = query.text(), query.number()
    over = key + b"/all"
    if peer.table.add(key, 1) >= size:
        peer.table.set(over, b"")
    return _wait_for(peer, [over])


_QUERIES: dict[int, Callable[[Peer, _Reader], bytes]] = {
    1: _set,
    2: _compare_set,
    3: _get,
    4: _add,
    5: _check,
    6: _wait,
    7: _count,
    8: _delete,
    9: _append,
    10: _multi_get,
    11: _multi_set,
    _CANCEL_WAIT: _cancel_wait,
    13: _ping,
    14: _push,
    15: _pop,
    16: _queue_length,
    17: _list,
    18: _barrier,
}
