"""What launcher and agent say to each other: frames over the two streams of a channel.

    launcher ─▶ agent    SETUP once, then START, SIGNAL, STOP, KILL of one worker, and BEAT;
                         INTERRUPTED when the user has stopped the job
    agent ─▶ launcher    a mark, FACTS once, then OUTPUT, ERRORS, ACTIVITY, END of one worker; BEAT

A frame is one letter, the number of the worker, and the length of the content that follows. What a
shell on the other host prints before the agent begins, as some do, is skipped: `MARK` comes first.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import IO, NamedTuple

SETUP, START, SIGNAL, STOP, KILL = b"c", b"s", b"u", b"t", b"k"
INTERRUPTED = b"i"
FACTS, OUTPUT, ERRORS, ACTIVITY, END = b"f", b"o", b"e", b"a", b"x"
BEAT = b"b"
NOBODY = 0  # the number in a frame that is about no worker
MARK = b"\0farandole agent\0\n"

_HEADER = struct.Struct(">cII")
_MOST_BYTES = 64 << 20  # a larger length is no length: the streams are out of step
_MOST_BEFORE_MARK = 1 << 20


class Frame(NamedTuple):
    """One message."""

    kind: bytes
    worker: int
    content: bytes


def encoded(kind: bytes, worker: int = NOBODY, content: bytes = b"") -> bytes:
    return _HEADER.pack(kind, worker, len(content)) + content


def read_frame(stream: IO[bytes]) -> Frame | None:
    """The next one; None at the end, also in the middle of a frame."""
    header = stream.read(_HEADER.size)
    if len(header) < _HEADER.size:
        return None
    kind, worker, length = _HEADER.unpack(header)
    if length > _MOST_BYTES:
        return None
    content = stream.read(length)
    return Frame(kind, worker, content) if len(content) == length else None


def skip_to_mark(stream: IO[bytes]) -> bool:
    """Whether the agent has begun. False: the stream ended, or is something else."""
    seen = bytearray()
    while not seen.endswith(MARK):
        found = stream.read(1)
        if not found or len(seen) > _MOST_BEFORE_MARK:
            return False
        seen += found
    return True


class FrameParser:
    """Takes bytes as they come, and hands out frames when they are whole."""

    def __init__(self) -> None:
        self._held = bytearray()

    def feed(self, found: bytes) -> Iterator[Frame]:
        """Raises `ValueError` for what is no frame."""
        self._held += found
        while len(self._held) >= _HEADER.size:
            kind, worker, length = _HEADER.unpack_from(self._held)
            if length > _MOST_BYTES:
                raise ValueError(f"a frame of {length} bytes")
            end = _HEADER.size + length
            if len(self._held) < end:
                return
            content = bytes(self._held[_HEADER.size : end])
            del self._held[:end]
            yield Frame(kind, worker, content)
