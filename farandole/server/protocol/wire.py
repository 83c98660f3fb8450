"""Messages as frames of bytes, and back. Nothing that arrives is believed before it is checked.

    frame 0   header   magic, version, how many messages, tensors, bytes of small tensors, of texts
              records  one a message, all of the same layout: its numbers
              entries  one a tensor (payload.py)
              small tensors
              texts    UTF-8, in the order of the messages
    frame 1…  the large tensors

One layout for all types wastes some bytes and saves much time: one call packs a record, one unpacks
it. Fields that never meet in one message share a place.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from farandole.server.filters.key_cache import KeyReceiver, KeySender
from farandole.server.protocol.arena import Arena
from farandole.server.protocol.handshake import VERSION
from farandole.server.protocol.messages import (
    Ack,
    Behind,
    Cause,
    Command,
    Data,
    Done,
    Forward,
    Got,
    Kind,
    Message,
    Moved,
    Problem,
    Read,
    Refused,
    Snapshot,
)
from farandole.server.protocol.payload import ENTRY, Incoming, Malformed, Outgoing

_MAGIC = b"FdMs"
_HEADER = struct.Struct("<4sHxxIIII")
# Type, kind, flag, which tensors, length of the text; the numbers, as `_Writer._record` names them;
# the cause of a refusal.
_RECORD = struct.Struct("<BBBBI12qdB7x")

_COMMAND, _READ, _ACK, _DATA, _REFUSED, _MOVED, _FORWARD, _DONE, _BEHIND, _SNAPSHOT, _GOT = range(
    11
)
_ROWS, _VALUES, _INTO = 1, 2, 4
_TENSORS_OF = {
    _COMMAND: _ROWS | _VALUES,
    _FORWARD: _ROWS | _VALUES,
    _READ: _ROWS | _INTO,
    _DATA: _VALUES,
}
_PAGE_BYTES = 2**20
_KINDS = {int(kind): kind for kind in Kind}
_CAUSES = {int(cause): cause for cause in Cause}


def encode(
    messages: Sequence[Message], arena: Arena | None = None, keys: KeySender | None = None
) -> list[bytes | memoryview]:
    """Frames to send. All but the first are the tensors' own memory, and keep it alive.

    `arena` is what the other end sees too, `keys` the lists of rows that it knows already. Raises
    `UserError` for a tensor that is too long.
    """
    writer = _Writer(arena, keys)
    for message in messages:
        writer.write(message)
    return writer.frames()


def pages(
    messages: Sequence[Message], arena: Arena | None = None, keys: KeySender | None = None
) -> Iterator[list[bytes | memoryview]]:
    """As `encode`, in several sets of frames where there is much to send.

    While one set is on its way, the next can be sealed, and the one before be checked and read.
    """
    writer, written = _Writer(arena, keys), 0
    for message in messages:
        writer.write(message)
        written += 1
        if writer.frame_bytes >= _PAGE_BYTES:
            yield writer.frames()
            writer, written = _Writer(arena, keys), 0
    if written:
        yield writer.frames()


def decode(
    frames: Sequence[bytes | memoryview],
    arena: Arena | None = None,
    keys: KeyReceiver | None = None,
) -> list[Message]:
    """The messages in frames. Large tensors lie in the frames' own memory, and keep it alive.

    Raises `Malformed`.
    """
    if not frames or len(frames[0]) < _HEADER.size:
        raise Malformed("there is no header")
    magic, version, messages, tensors, small_bytes, text_bytes = _HEADER.unpack_from(frames[0])
    if magic != _MAGIC:
        raise Malformed(f"it begins with {magic!r}, not {_MAGIC!r}")
    if version != VERSION:
        raise Malformed(f"it is of version {version}, and this is version {VERSION}")
    entries_at = _HEADER.size + messages * _RECORD.size
    small_at = entries_at + tensors * ENTRY.size
    texts_at = small_at + small_bytes
    if texts_at + text_bytes != len(frames[0]):
        raise Malformed(
            f"{messages} messages, {tensors} tensors, {small_bytes} and {text_bytes} bytes "
            f"do not take {len(frames[0])} bytes"
        )
    # A copy: a short frame lies anywhere in memory, and the numbers in it must be aligned.
    head = memoryview(bytearray(frames[0]))
    content = Incoming(head[entries_at:small_at], head[small_at:texts_at], frames[1:], arena, keys)
    texts = _Texts(head[texts_at:])
    records = _RECORD.iter_unpack(head[_HEADER.size : entries_at])
    read = [_message(record, content, texts) for record in records]
    content.finish()
    texts.finish()
    return read


class _Writer:
    def __init__(self, arena: Arena | None, keys: KeySender | None) -> None:
        self._records: list[bytes] = []
        self._texts: list[bytes] = []
        self._content = Outgoing(arena, keys)

    def frames(self) -> list[bytes | memoryview]:
        content = self._content
        small, texts = b"".join(content.small), b"".join(self._texts)
        counts = len(self._records), len(content.entries), len(small), len(texts)
        header = _HEADER.pack(_MAGIC, VERSION, *counts)
        head = b"".join((header, *self._records, *content.entries, small, texts))
        return [head, *content.frames]

    @property
    def frame_bytes(self) -> int:
        return self._content.frame_bytes

    def write(self, message: Message) -> None:
        match message:
            case Command():
                self._command(_COMMAND, message)
            case Forward(outer, epoch, index, command):
                self._command(_FORWARD, command, outer, epoch, index)
            case Read():
                self._read(message)
            case Ack(ticket, clock):
                self._record(_ACK, ticket=ticket, clock=clock)
            case Data(ticket, values, clock):
                self._record(_DATA, has=self._tensors(values=values), ticket=ticket, clock=clock)
            case Refused(ticket, Problem(text, cause)):
                self._record(_REFUSED, text=text, ticket=ticket, cause=cause)
            case Moved(ticket, range_, epoch):
                self._record(_MOVED, ticket=ticket, range_=range_, epoch=epoch)
            case Done(range_, epoch, index):
                self._record(_DONE, range_=range_, epoch=epoch, index=index)
            case Behind(range_, epoch, index):
                self._record(_BEHIND, range_=range_, epoch=epoch, index=index)
            case Snapshot(range_, epoch, text, tensors):
                for tensor in tensors:
                    self._content.add(tensor)
                self._record(_SNAPSHOT, text=text, range_=range_, epoch=epoch, number=len(tensors))
            case Got(range_, epoch):
                self._record(_GOT, range_=range_, epoch=epoch)

    def _command(
        self, code: int, command: Command, outer: int = 0, epoch: int = 0, index: int = 0
    ) -> None:
        self._record(
            code,
            kind=command.kind,
            flag=command.ticks,
            has=self._tensors(command.rows, command.values),
            text=command.text,
            range_=command.range,
            outer=outer,
            epoch=epoch,
            index=index,
            sender=command.sender,
            number=command.number,
            ticket=command.ticket,
            table=command.table,
            start=command.start,
            stop=command.stop,
            slot=command.slot,
            clock=command.clock,
            rate=command.rate,
            cause=command.cause,
        )

    def _read(self, read: Read) -> None:
        has = self._tensors(read.rows)
        # Memory that is not shared is of no use to the server, which then sends its answer.
        if read.into is not None and self._content.shares(read.into):
            self._content.add(read.into)
            has |= _INTO
        self._record(
            _READ,
            flag=read.rounds,
            has=has,
            text=read.text,
            range_=read.range,
            index=read.view,
            sender=read.sender,
            number=read.number,
            ticket=read.ticket,
            table=read.table,
            start=read.start,
            stop=read.stop,
            slot=read.slot,
            clock=read.needs,
        )

    def _tensors(self, rows: torch.Tensor | None = None, values: torch.Tensor | None = None) -> int:
        """Adds those that are there, and says which they are."""
        has = 0
        if rows is not None:
            self._content.add_rows(rows)
            has |= _ROWS
        if values is not None:
            self._content.add(values)
            has |= _VALUES
        return has

    def _record(
        self,
        code: int,
        *,
        kind: int = 0,
        flag: bool = False,
        has: int = 0,
        text: str = "",
        range_: int = 0,
        outer: int = 0,  # the range of a Forward
        epoch: int = 0,
        index: int = 0,  # or view
        sender: int = 0,
        number: int = 0,  # or how many tensors
        ticket: int = 0,
        table: int = 0,
        start: int = 0,
        stop: int = 0,
        slot: int = 0,
        clock: int = 0,
        rate: float = 0.0,
        cause: int = 0,
    ) -> None:
        written = text.encode()
        self._texts.append(written)
        self._records.append(
            _RECORD.pack(
                code, kind, flag, has, len(written), range_, outer, epoch, index, sender, number,
                ticket, table, start, stop, slot, clock, rate, cause,
            )
        )  # fmt: skip


class _Texts:
    """Hands out the texts in the order in which they were written."""

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory
        self._at = 0

    def next(self, length: int) -> str:
        if not length:
            return ""
        begin, self._at = self._at, self._at + length
        if self._at > len(self._memory):
            raise Malformed(f"a text ends at byte {self._at} of {len(self._memory)}")
        try:
            return str(self._memory[begin : self._at], "utf-8")
        except UnicodeDecodeError as error:
            raise Malformed(f"a text is not UTF-8: {error}") from None

    def finish(self) -> None:
        if self._at != len(self._memory):
            raise Malformed(f"{len(self._memory) - self._at} bytes of text belong to no message")


def _message(record: tuple[Any, ...], content: Incoming, texts: _Texts) -> Message:
    (
        code, kind, flag, has, text_bytes, range_, outer, epoch, index, sender, number, ticket,
        table, start, stop, slot, clock, rate, cause,
    ) = record  # fmt: skip
    if has & ~_TENSORS_OF.get(code, 0):
        raise Malformed(f"a message of type {code} cannot have tensors {has}")
    if flag > 1:
        raise Malformed(f"a truth value is {flag}")
    if cause not in _CAUSES:
        raise Malformed(f"there is no cause {cause} of a refusal")
    rows = content.next_rows() if has & _ROWS else None
    values = content.next() if has & _VALUES else None
    text = texts.next(text_bytes)
    if code in (_COMMAND, _FORWARD):
        if kind not in _KINDS:
            raise Malformed(f"there is no command of kind {kind}")
        command = Command(
            kind=_KINDS[kind],
            range=range_,
            sender=sender,
            number=number,
            ticket=ticket,
            table=table,
            start=start,
            stop=stop,
            rows=rows,
            values=values,
            slot=slot,
            rate=rate,
            clock=clock,
            ticks=flag == 1,
            text=text,
            cause=_CAUSES[cause],
        )
        return command if code == _COMMAND else Forward(outer, epoch, index, command)
    if code == _READ:
        into = content.next(shared=True) if has & _INTO else None
        return Read(
            range=range_,
            sender=sender,
            number=number,
            ticket=ticket,
            table=table,
            start=start,
            stop=stop,
            rows=rows,
            slot=slot,
            needs=clock,
            rounds=flag == 1,
            view=index,
            text=text,
            into=into,
        )
    if code == _ACK:
        return Ack(ticket, clock)
    if code == _DATA:
        return Data(ticket, values, clock)
    if code == _REFUSED:
        return Refused(ticket, Problem(text, _CAUSES[cause]))
    if code == _MOVED:
        return Moved(ticket, range_, epoch)
    if code == _DONE:
        return Done(range_, epoch, index)
    if code == _BEHIND:
        return Behind(range_, epoch, index)
    if code == _SNAPSHOT:
        return Snapshot(range_, epoch, text, tuple(content.next() for _ in range(number)))
    if code == _GOT:
        return Got(range_, epoch)
    raise Malformed(f"there is no message of type {code}")
