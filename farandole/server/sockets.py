"""What a `Port` and a `Line` do alike with their sockets. The protocol is told in channels.py."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import zmq

from farandole.server.seal import MAX_FRAME_BYTES

KIND_BYTES = 4  # what each message begins with says what it is: a greeting, a seal, or one of these
PLAIN = b"FdNo"  # a word, not sealed
PROBE = b"FdPr"  # nothing at all: only to find out whether the peer is still there
UNKNOWN_PEER = "unknown peer"
KNOWN_KEYS_BYTES = 16 << 20  # of row lists that each connection remembers, the same at both ends
_READABLE = int(zmq.POLLIN)
_AT_ONCE = int(zmq.NOBLOCK)
_AT_ONCE_AND_MORE = int(zmq.NOBLOCK) | int(zmq.SNDMORE)
_ZERO_COPY_BYTES = 64 * 1024  # below, a copy costs less than learning when zmq needs it no more


def open_socket(context: zmq.Context[Any], kind: int) -> zmq.Socket[Any]:
    socket: zmq.Socket[Any] = context.socket(kind)
    socket.linger = 0
    socket.set_hwm(0)  # messages are never thrown away for being many; callers wait for answers
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, 30)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, 10)
    socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, 3)
    socket.setsockopt(zmq.RECONNECT_IVL, 50)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
    return socket


def is_readable(socket: zmq.Socket[Any]) -> bool:
    """Asked instead of trying: an exception for each time that nothing is there takes 20 µs."""
    return bool(int(socket.getsockopt(zmq.EVENTS)) & _READABLE)


def arrived(socket: zmq.Socket[Any]) -> Iterator[list[memoryview]]:
    while is_readable(socket):
        parts = socket.recv_multipart(_AT_ONCE, copy=False)
        yield [part.buffer for part in parts]


def send(
    socket: zmq.Socket[Any], frames: Sequence[bytes | memoryview], track: bool
) -> list[zmq.MessageTracker]:
    """Long frames go from their own memory; with `track`, returns what says when they are sent."""
    trackers = []
    for index, frame in enumerate(frames):
        flags = _AT_ONCE_AND_MORE if index + 1 < len(frames) else _AT_ONCE
        if len(frame) < _ZERO_COPY_BYTES:
            socket.send(frame, flags)
        else:
            tracker = socket.send(frame, flags, copy=False, track=track)
            if tracker is not None:
                trackers.append(tracker)
    return trackers
