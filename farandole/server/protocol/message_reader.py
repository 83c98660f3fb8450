"""Records back into messages. Every field is checked before it is believed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch

from farandole.server.protocol import record
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
from farandole.server.protocol.payload import Incoming, Malformed
from farandole.server.protocol.record import CAUSES, KINDS, TENSORS_OF, Record

_TICKET, _CLOCK = Record._fields.index("ticket"), Record._fields.index("clock")


class Texts:
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


class MessageReader:
    """Reads messages one after the other: their tensors and texts stand in the same order."""

    def __init__(self, content: Incoming, texts: Texts) -> None:
        self._content = content
        self._texts = texts

    def read(self, fields: tuple[Any, ...]) -> Message:
        """The message of a record. Raises `Malformed`."""
        code, _, flag, has, text_bytes = fields[:5]
        if has & ~TENSORS_OF.get(code, 0):
            raise Malformed(f"a message of type {code} cannot have tensors {has}")
        if flag > 1:
            raise Malformed(f"a truth value is {flag}")
        if fields[-1] not in CAUSES:
            raise Malformed(f"there is no cause {fields[-1]} of a refusal")
        rows = self._content.next_rows() if has & record.ROWS else None
        values = self._content.next() if has & record.VALUES else None
        text = self._texts.next(text_bytes)
        if code == record.COMMAND:
            return _command(fields, rows, values, text)
        if code == record.READ:
            into = self._content.next(shared=True) if has & record.INTO else None
            return _read(fields, rows, into, text)
        if code == record.ACK:
            return Ack(fields[_TICKET], fields[_CLOCK])
        if code == record.DATA:
            return Data(fields[_TICKET], values, fields[_CLOCK])
        packed = Record(*fields)
        if code == record.FORWARD:
            command = _command(fields, rows, values, text)
            return Forward(packed.outer, packed.epoch, packed.position, command)
        if code == record.SNAPSHOT:
            tensors = tuple(self._content.next() for _ in range(packed.number))
            return Snapshot(packed.range, packed.epoch, text, tensors)
        if code == record.REFUSED:
            return Refused(packed.ticket, Problem(text, CAUSES[packed.cause]))
        if code in _OF_NUMBERS:
            return _OF_NUMBERS[code](packed)
        raise Malformed(f"there is no message of type {code}")


_OF_NUMBERS: Mapping[int, Callable[[Record], Message]] = MappingProxyType(
    {
        record.MOVED: lambda packed: Moved(packed.ticket, packed.range, packed.epoch),
        record.DONE: lambda packed: Done(packed.range, packed.epoch, packed.position),
        record.BEHIND: lambda packed: Behind(packed.range, packed.epoch, packed.position),
        record.GOT: lambda packed: Got(packed.range, packed.epoch),
    }
)
"""The other messages that have neither text nor tensors."""


def _command(
    fields: tuple[Any, ...], rows: torch.Tensor | None, values: torch.Tensor | None, text: str
) -> Command:
    kind, flag = fields[1], fields[2]
    if kind not in KINDS:
        raise Malformed(f"there is no command of kind {kind}")
    range_, *_, slot, clock, rate, cause = fields[5:]
    sender, number, ticket, table, start, stop = fields[9:15]
    return Command(
        KINDS[kind],
        range_,
        sender,
        number,
        ticket,
        table,
        start,
        stop,
        rows,
        values,
        slot,
        rate,
        clock,
        flag == 1,
        text,
        CAUSES[cause],
    )


def _read(
    fields: tuple[Any, ...], rows: torch.Tensor | None, into: torch.Tensor | None, text: str
) -> Read:
    range_, view, flag = fields[5], fields[8], fields[2]
    sender, number, ticket, table, start, stop, slot, needs = fields[9:17]
    return Read(
        range_,
        sender,
        number,
        ticket,
        table,
        start,
        stop,
        rows,
        slot,
        needs,
        flag == 1,
        view,
        text,
        into,
    )
