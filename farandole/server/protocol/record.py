"""The record of a message: its numbers, packed. All types share one layout of 120 bytes.

    type, kind, flag, tensors   a byte each; the last says which tensors come with the message
    length of the text
    twelve numbers              see `Record`; fields that never meet in one message share a place
    rate, cause

One layout for all types wastes some bytes and saves much time: one call unpacks any record. To pack
one, each type has a `Packer` that names the numbers it has; the rest stays zero.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any, Final, NamedTuple

from farandole.server.protocol.messages import Cause, Kind

(
    COMMAND, READ, ACK, DATA, REFUSED, MOVED, FORWARD, DONE, BEHIND, SNAPSHOT, GOT,
) = range(11)  # fmt: skip

ROWS, VALUES, INTO = 1, 2, 4
"""Which tensors come with a message."""

TENSORS_OF = {COMMAND: ROWS | VALUES, FORWARD: ROWS | VALUES, READ: ROWS | INTO, DATA: VALUES}
KINDS = {int(kind): kind for kind in Kind}
CAUSES = {int(cause): cause for cause in Cause}


class Record(NamedTuple):
    """A record as it was unpacked. Nothing in it has been checked."""

    code: int
    kind: int
    flag: int
    has: int  # which tensors
    text_bytes: int
    range: int
    outer: int  # the range of a Forward
    epoch: int
    position: int  # index, or view
    sender: int
    number: int  # or how many tensors
    ticket: int
    table: int
    start: int
    stop: int
    slot: int
    clock: int
    rate: float
    cause: int


_HEAD: Final = "<BBBBI"
_NUMBERS: Final = Record._fields[5:17]
_WHOLE: Final = struct.Struct(_HEAD + "12qdB7x")
RECORD_BYTES: Final = _WHOLE.size


def unpack_all(memory: memoryview) -> Iterator[tuple[Any, ...]]:
    """The fields of each record, in the order of `Record`, and as plain tuples: naming the fields
    of every message would take as long as all the rest of reading it."""
    return _WHOLE.iter_unpack(memory)


class Packer:
    """Packs the records of one type. `numbers` are the places that it fills, in the order of
    `Record`; `of` are the attributes of a message that go there, if they have other names."""

    def __init__(
        self, code: int, *numbers: str, of: tuple[str, ...] = (), rate: bool = False
    ) -> None:
        assert list(numbers) == [name for name in _NUMBERS if name in numbers]
        places = "".join("q" if name in numbers else "8x" for name in _NUMBERS)
        layout = struct.Struct(_HEAD + places + ("dB7x" if rate else "8xB7x"))
        assert layout.size == RECORD_BYTES
        self.code = code
        self.pack = layout.pack
        """Takes code, kind, flag, tensors and length of the text; the numbers of the places; the
        rate, where there is one; the cause."""
        self.numbers_of: Callable[[Any], tuple[int, ...]] = attrgetter(*(of or numbers))
