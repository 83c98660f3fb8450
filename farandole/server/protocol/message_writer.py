"""Messages into frames: a record, perhaps a text, perhaps tensors for each."""

from __future__ import annotations

import struct
from typing import Final

import torch

from farandole.server.filters.key_cache import KeySender
from farandole.server.protocol import record
from farandole.server.protocol.arena import Arena
from farandole.server.protocol.handshake import VERSION
from farandole.server.protocol.messages import (
    Ack,
    Behind,
    Command,
    Data,
    Done,
    Forward,
    Got,
    Message,
    Moved,
    Problem,
    Read,
    Refused,
    Snapshot,
)
from farandole.server.protocol.payload import Outgoing
from farandole.server.protocol.record import Packer

MAGIC: Final = b"FdMs"
HEADER: Final = struct.Struct("<4sHxxIIII")
"""Magic, version, how many messages, tensors, bytes of small tensors, bytes of texts."""

_OF_COMMANDS = ("sender", "number", "ticket", "table", "start", "stop", "slot")
_COMMAND = Packer(record.COMMAND, "range", *_OF_COMMANDS, "clock", rate=True)
_FORWARD = Packer(
    record.FORWARD, "range", "outer", "epoch", "position", *_OF_COMMANDS, "clock", rate=True
)
_READ = Packer(
    record.READ,
    "range",
    "position",
    *_OF_COMMANDS,
    "clock",
    of=("range", "view", *_OF_COMMANDS, "needs"),
)
_ACK = Packer(record.ACK, "ticket", "clock")
_DATA = Packer(record.DATA, "ticket", "clock")
_REFUSED = Packer(record.REFUSED, "ticket")
_MOVED = Packer(record.MOVED, "range", "epoch", "ticket")
_DONE = Packer(record.DONE, "range", "epoch", "position")
_BEHIND = Packer(record.BEHIND, "range", "epoch", "position")
_SNAPSHOT = Packer(record.SNAPSHOT, "range", "epoch", "number")
_GOT = Packer(record.GOT, "range", "epoch")


class MessageWriter:
    """Collects messages; `frames` is what to send."""

    def __init__(self, arena: Arena | None, keys: KeySender | None) -> None:
        self._records: list[bytes] = []
        self._texts: list[bytes] = []
        self._content = Outgoing(arena, keys)

    def frames(self) -> list[bytes | memoryview]:
        content = self._content
        small, texts = b"".join(content.small), b"".join(self._texts)
        counts = len(self._records), len(content.entries), len(small), len(texts)
        header = HEADER.pack(MAGIC, VERSION, *counts)
        head = b"".join((header, *self._records, *content.entries, small, texts))
        return [head, *content.frames]

    @property
    def frame_bytes(self) -> int:
        return self._content.frame_bytes

    def write(self, message: Message) -> None:
        self._records.append(self._record(message))

    def _record(self, message: Message) -> bytes:
        match message:
            case Command():
                return self._command(_COMMAND, message, _COMMAND.numbers_of(message))
            case Forward(outer, epoch, index, command):
                range_, *rest = _COMMAND.numbers_of(command)
                return self._command(_FORWARD, command, (range_, outer, epoch, index, *rest))
            case Read():
                return self._read(message)
            case Ack(ticket, clock):
                return _ACK.pack(_ACK.code, 0, 0, 0, 0, ticket, clock, 0)
            case Data(ticket, values, clock):
                has = self._tensors(None, values)
                return _DATA.pack(_DATA.code, 0, 0, has, 0, ticket, clock, 0)
            case Refused(ticket, Problem(text, cause)):
                return _REFUSED.pack(_REFUSED.code, 0, 0, 0, self._text(text), ticket, cause)
            case Moved(ticket, range_, epoch):
                return _MOVED.pack(_MOVED.code, 0, 0, 0, 0, range_, epoch, ticket, 0)
            case Done(range_, epoch, index):
                return _DONE.pack(_DONE.code, 0, 0, 0, 0, range_, epoch, index, 0)
            case Behind(range_, epoch, index):
                return _BEHIND.pack(_BEHIND.code, 0, 0, 0, 0, range_, epoch, index, 0)
            case Snapshot(range_, epoch, text, tensors):
                for tensor in tensors:
                    self._content.add(tensor)
                code, length, count = _SNAPSHOT.code, self._text(text), len(tensors)
                return _SNAPSHOT.pack(code, 0, 0, 0, length, range_, epoch, count, 0)
            case Got(range_, epoch):
                return _GOT.pack(_GOT.code, 0, 0, 0, 0, range_, epoch, 0)

    def _command(self, packer: Packer, command: Command, numbers: tuple[int, ...]) -> bytes:
        has = self._tensors(command.rows, command.values)
        length = self._text(command.text)
        return packer.pack(
            packer.code,
            command.kind,
            command.ticks,
            has,
            length,
            *numbers,
            command.rate,
            command.cause,
        )

    def _read(self, read: Read) -> bytes:
        has = self._tensors(read.rows, None)
        # Memory that is not shared is of no use to the server, which then sends its answer.
        if read.into is not None and self._content.shares(read.into):
            self._content.add(read.into)
            has |= record.INTO
        length = self._text(read.text)
        return _READ.pack(_READ.code, 0, read.rounds, has, length, *_READ.numbers_of(read), 0)

    def _text(self, text: str) -> int:
        """Adds it; its length in bytes."""
        if not text:
            return 0
        written = text.encode()
        self._texts.append(written)
        return len(written)

    def _tensors(self, rows: torch.Tensor | None, values: torch.Tensor | None) -> int:
        """Adds those that are there, and says which they are."""
        has = 0
        if rows is not None:
            self._content.add_rows(rows)
            has |= record.ROWS
        if values is not None:
            self._content.add(values)
            has |= record.VALUES
        return has
