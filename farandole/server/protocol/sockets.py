"""What a `Port` and a `Line` do alike with their sockets. For the protocol see channels.py."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy
import zmq

KIND_BYTES = 4  # what each message begins with says what it is: a greeting, a seal, or one of these
PLAIN = b"FdNo"  # a notice, not sealed
PROBE = b"FdPr"  # nothing at all: only to find out whether the peer is still there
UNKNOWN_PEER = "unknown peer"
KNOWN_KEYS_BYTES = 16 << 20  # of row lists that each connection remembers, the same at both ends
FRAME_BYTES = 256 * 1024  # with 64 KiB, 16 MiB take half as long again
"""No frame that travels is longer, so a stranger can make us hold no more before we know who it is.
Longer ones are cut. A frame of just this length is continued by the next one."""
HANDSHAKE_SECONDS = 5.0  # after that, a connection that nobody has vouched for is closed
_READABLE = int(zmq.POLLIN)
_AT_ONCE = int(zmq.NOBLOCK)
_AT_ONCE_AND_MORE = int(zmq.NOBLOCK) | int(zmq.SNDMORE)
_ZERO_COPY_BYTES = 64 * 1024  # below, a copy costs less than learning when zmq needs it no more
_CURVE_BYTES = 256  # more than what encryption adds to a frame


def open_socket(context: zmq.Context[Any], kind: int) -> zmq.Socket[Any]:
    socket: zmq.Socket[Any] = context.socket(kind)
    socket.linger = 0
    socket.set_hwm(0)  # messages are never thrown away for being many; callers wait for answers
    limit_strangers(socket)
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, 30)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, 10)
    socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, 3)
    socket.setsockopt(zmq.RECONNECT_IVL, 50)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
    return socket


def limit_strangers(socket: zmq.Socket[Any]) -> None:
    """What one connection may cost before the mechanism has let it in."""
    socket.setsockopt(zmq.MAXMSGSIZE, FRAME_BYTES + _CURVE_BYTES)
    socket.setsockopt(zmq.HANDSHAKE_IVL, int(HANDSHAKE_SECONDS * 1000))


def is_readable(socket: zmq.Socket[Any]) -> bool:
    """Asked instead of trying: an exception for each time that nothing is there takes 20 µs."""
    return bool(int(socket.getsockopt(zmq.EVENTS)) & _READABLE)


def arrived(socket: zmq.Socket[Any]) -> Iterator[list[memoryview]]:
    while is_readable(socket):
        parts = socket.recv_multipart(_AT_ONCE, copy=False)
        yield joined([part.buffer for part in parts])


def cut(frames: Sequence[bytes | memoryview]) -> Iterator[bytes | memoryview]:
    for frame in frames:
        if len(frame) < FRAME_BYTES:
            yield frame
        else:
            view = memoryview(frame)
            for begin in range(0, len(frame) + 1, FRAME_BYTES):  # the last one may be empty
                yield view[begin : begin + FRAME_BYTES]


def joined(parts: list[memoryview]) -> list[memoryview]:
    """The frames that `cut` made these parts of."""
    if all(len(part) < FRAME_BYTES for part in parts):
        return parts
    frames: list[memoryview] = []
    begin = 0
    for index, part in enumerate(parts):
        if len(part) >= FRAME_BYTES and index + 1 < len(parts):
            continue
        pieces, begin = parts[begin : index + 1], index + 1
        frames.append(_together(pieces) if len(pieces) > 1 else part)
    return frames


def _together(pieces: Sequence[memoryview]) -> memoryview:
    whole = numpy.empty(sum(map(len, pieces)), numpy.uint8).data
    at = 0
    for piece in pieces:
        whole[at : at + len(piece)] = piece
        at += len(piece)
    return whole


def send(
    socket: zmq.Socket[Any], frames: Sequence[bytes | memoryview], track: bool
) -> list[zmq.MessageTracker]:
    """Long frames go from their own memory; with `track`, returns what says when they are sent."""
    trackers = []
    parts = list(cut(frames))
    for index, frame in enumerate(parts):
        flags = _AT_ONCE_AND_MORE if index + 1 < len(parts) else _AT_ONCE
        if len(frame) < _ZERO_COPY_BYTES:
            socket.send(frame, flags)
        else:
            tracker = socket.send(frame, flags, copy=False, track=track)
            if tracker is not None:
                trackers.append(tracker)
    return trackers
