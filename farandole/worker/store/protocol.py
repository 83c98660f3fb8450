"""The language between our client and our server: one request, one answer, in this order.

    message   length u32 │ what u8 │ field, field, …        `what`: an operation, or a status
    field     length u32 │ bytes

Numbers are little-endian. Between hosts the part after the length is followed by a tag
(handshake.py), and the length counts it.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final

from farandole.errors import CommError

LENGTH: Final = struct.Struct("<I")
NUMBER: Final = struct.Struct("<q")

# Operations.
SET: Final = 1
GET: Final = 2
ADD: Final = 3
CHECK: Final = 4
WAIT: Final = 5
COMPARE_SET: Final = 6
DELETE: Final = 7
COUNT: Final = 8
APPEND: Final = 9
MULTI_GET: Final = 10
MULTI_SET: Final = 11
LIST: Final = 12
PUSH: Final = 13
POP: Final = 14
QUEUE_LENGTH: Final = 15

# Statuses.
DONE: Final = 0
REFUSED: Final = 1  # the field says why
EMPTY: Final = 2  # a queue, for those who do not wait

MAX_MESSAGE_BYTES: Final = 64 << 20
"""What one message may have. PyTorch's store takes values up to 8 MB."""
MAX_STORE_BYTES: Final = 512 << 20
"""What all keys and values of a store may have together."""


class ProtocolError(CommError):
    """What arrived is no message of this language. The connection is of no more use."""


class RefusedError(CommError):
    """A message that is understood, and cannot be done. The connection stays."""


def pack(what: int, fields: Sequence[bytes] = ()) -> bytes:
    """A message less its length."""
    parts = [bytes((what,))]
    for field in fields:
        parts.append(LENGTH.pack(len(field)))
        parts.append(field)
    return b"".join(parts)


def unpack(message: bytes) -> tuple[int, list[bytes]]:
    """What `pack` was given. Raises `ProtocolError`."""
    if not message:
        raise ProtocolError("an empty message")
    fields, position, end = [], 1, len(message)
    while position < end:
        if position + LENGTH.size > end:
            raise ProtocolError("a field's length is cut off")
        (length,) = LENGTH.unpack_from(message, position)
        position += LENGTH.size
        if position + length > end:
            raise ProtocolError(f"a field of {length} bytes does not fit in its message")
        fields.append(message[position : position + length])
        position += length
    return message[0], fields


def framed(message: bytes) -> bytes:
    return LENGTH.pack(len(message)) + message


def take_message(inbox: bytearray) -> bytes | None:
    """Removes the first message from what has arrived; None while it is not whole.

    Raises `ProtocolError` for one that is too long, before it has arrived.
    """
    if len(inbox) < LENGTH.size:
        return None
    (length,) = LENGTH.unpack_from(inbox)
    if not 0 < length <= MAX_MESSAGE_BYTES:
        raise ProtocolError(f"a message of {length} bytes; the limit is {MAX_MESSAGE_BYTES}")
    end = LENGTH.size + length
    if len(inbox) < end:
        return None
    message = bytes(inbox[LENGTH.size : end])
    del inbox[:end]
    return message
