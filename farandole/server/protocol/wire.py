"""Messages as frames of bytes, and back. Nothing that arrives is believed before it is checked.

    frame 0   header   magic, version, how many messages, tensors, bytes of small tensors, of texts
              records  one a message, all of the same layout: its numbers
              entries  one a tensor (payload.py)
              small tensors
              texts    UTF-8, in the order of the messages
    frame 1…  the large tensors

The records are described in record.py, written by message_writer.py and read by message_reader.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from farandole.server.filters.key_cache import KeyReceiver, KeySender
from farandole.server.protocol.arena import Arena
from farandole.server.protocol.handshake import VERSION
from farandole.server.protocol.message_reader import MessageReader, Texts
from farandole.server.protocol.message_writer import HEADER, MAGIC, MessageWriter
from farandole.server.protocol.messages import Message
from farandole.server.protocol.payload import ENTRY, Incoming, Malformed
from farandole.server.protocol.record import RECORD_BYTES, unpack_all

_PAGE_BYTES = 2**20


def encode(
    messages: Sequence[Message], arena: Arena | None = None, keys: KeySender | None = None
) -> list[bytes | memoryview]:
    """Frames to send. All but the first are the tensors' own memory, and keep it alive.

    `arena` is what the other end sees too, `keys` the lists of rows that it knows already. Raises
    `UserError` for a tensor that is too long.
    """
    writer = MessageWriter(arena, keys)
    for message in messages:
        writer.write(message)
    return writer.frames()


def pages(
    messages: Sequence[Message], arena: Arena | None = None, keys: KeySender | None = None
) -> Iterator[list[bytes | memoryview]]:
    """As `encode`, in several sets of frames where there is much to send.

    While one set is on its way, the next can be sealed, and the one before be checked and read.
    """
    writer, written = MessageWriter(arena, keys), 0
    for message in messages:
        writer.write(message)
        written += 1
        if writer.frame_bytes >= _PAGE_BYTES:
            yield writer.frames()
            writer, written = MessageWriter(arena, keys), 0
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
    if not frames or len(frames[0]) < HEADER.size:
        raise Malformed("there is no header")
    magic, version, messages, tensors, small_bytes, text_bytes = HEADER.unpack_from(frames[0])
    if magic != MAGIC:
        raise Malformed(f"it begins with {magic!r}, not {MAGIC!r}")
    if version != VERSION:
        raise Malformed(f"it is of version {version}, and this is version {VERSION}")
    entries_at = HEADER.size + messages * RECORD_BYTES
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
    texts = Texts(head[texts_at:])
    reader = MessageReader(content, texts)
    read = [reader.read(fields) for fields in unpack_all(head[HEADER.size : entries_at])]
    content.finish()
    texts.finish()
    return read
