"""Messages as bytes: all come back as they were, and nothing else is taken for a message."""

from __future__ import annotations

import dataclasses
import gc
import random
import struct
import types
import typing
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from farandole.errors import UserError
from farandole.server.filters.key_cache import KeyReceiver, KeySender
from farandole.server.protocol import payload
from farandole.server.protocol.arena import Arena
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
from farandole.server.protocol.payload import Malformed, UnknownKeys
from farandole.server.protocol.record import RECORD_BYTES
from farandole.server.protocol.wire import decode, encode, pages

TYPES = typing.get_args(Message)
DTYPES = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
)
NUMBERS = st.integers(-(2**63), 2**63 - 1)
LENGTHS = st.sampled_from([0, 1, 3, 100, 513, 5000])  # from 4 KiB on, a frame of its own
HEADER_BYTES = 24


def make_tensor(dtype: torch.dtype, length: int, seed: int) -> torch.Tensor:
    """Any bits at all, so also NaNs of all kinds; a truth value has only two."""
    content = bytearray(random.Random(seed).randbytes(length * dtype.itemsize))
    if dtype is torch.bool:
        content = bytearray(byte & 1 for byte in content)
    return torch.frombuffer(content, dtype=dtype) if content else torch.empty(0, dtype=dtype)


def tensors(dtypes: st.SearchStrategy[torch.dtype]) -> st.SearchStrategy[torch.Tensor]:
    return st.builds(make_tensor, dtypes, LENGTHS, st.integers(0, 100))


def field_values(name: str, hint: object) -> st.SearchStrategy[object]:
    """From the type alone, so that a new field of a message is tested without a new line here."""
    if name == "into":
        return st.none()
    if name == "rows":
        return st.none() | tensors(st.just(torch.int64))
    known: dict[object, st.SearchStrategy[typing.Any]] = {
        int: NUMBERS,
        float: st.floats(),
        bool: st.booleans(),
        str: st.text(max_size=20),
        Kind: st.sampled_from(Kind),
        Cause: st.sampled_from(Cause),
        torch.Tensor: tensors(st.sampled_from(DTYPES)),
        type(None): st.none(),
    }
    if hint in known:
        return known[hint]
    if typing.get_origin(hint) is types.UnionType:
        return st.one_of(field_values(name, part) for part in typing.get_args(hint))
    if typing.get_origin(hint) is tuple:
        return st.lists(known[torch.Tensor], max_size=4).map(tuple)
    assert isinstance(hint, type)
    return messages_of(hint)


def messages_of(cls: type) -> st.SearchStrategy[typing.Any]:
    hints = typing.get_type_hints(cls)
    return st.builds(cls, **{name: field_values(name, hint) for name, hint in hints.items()})


MESSAGES = st.one_of(messages_of(cls) for cls in TYPES)


def plain(value: object) -> object:
    """Something that `==` compares to the bit."""
    if isinstance(value, torch.Tensor):
        assert value.dim() == 1
        return (value.dtype, value.view(torch.uint8).tolist())
    if isinstance(value, float):
        return struct.pack("<d", value)
    if isinstance(value, tuple):
        return [plain(part) for part in value]
    if dataclasses.is_dataclass(value):
        fields = dataclasses.fields(value)
        return type(value), [plain(getattr(value, field.name)) for field in fields]
    return type(value), value


def arrived(frames: list[bytes | memoryview]) -> list[memoryview]:
    """As they come from a socket: other memory, and writable."""
    return [memoryview(bytearray(frame)) for frame in frames]


@pytest.fixture(scope="module")
def arena() -> Iterator[Arena]:
    made = Arena.make(2**20)
    yield made
    made.close()


@pytest.mark.parametrize("cls", TYPES)
def test_every_type_comes_back_as_it_was(cls: type) -> None:
    @settings(max_examples=30)
    @given(messages_of(cls))
    def comes_back(message: Message) -> None:
        (read,) = decode(arrived(encode([message])))
        assert plain(read) == plain(message)

    comes_back()


@settings(max_examples=50)
@given(st.lists(MESSAGES, max_size=6))
def test_many_at_once_keep_their_order(messages: list[Message]) -> None:
    frames = encode(messages)
    for received in (arrived(frames), frames):  # also from memory that cannot be written
        assert [plain(read) for read in decode(received)] == [plain(one) for one in messages]


@settings(max_examples=50)
@given(st.lists(tensors(st.sampled_from(DTYPES)), min_size=1, max_size=4), st.data())
def test_tensors_in_shared_memory_are_not_sent(
    arena: Arena, values: list[torch.Tensor], data: st.DataObject
) -> None:
    taken, shared = [], []
    for value in values:
        if value.numel() and data.draw(st.booleans()):
            place = arena.take(value.nbytes)
            assert place is not None
            taken.append(place)
            shared.append(place.view(value.dtype).copy_(value))
        else:
            shared.append(value)
    sent = [Snapshot(1, 2, "", tuple(shared)), *(Data(3, one) for one in shared)]
    frames = encode(sent, arena)
    bytes_sent = sum(map(len, frames))
    outside = sum(one.nbytes for one in shared if arena.locate(one) is None)
    assert bytes_sent < 2 * outside + 300 * (1 + len(values))
    read = decode(arrived(frames), arena)
    assert [plain(one) for one in read] == [plain(one) for one in sent]
    assert isinstance(read[0], Snapshot)
    for got, had in zip(read[0].tensors, shared, strict=True):
        assert arena.locate(got) == arena.locate(had)
    for place in taken:
        arena.give_back(place)


def test_the_answer_goes_into_shared_memory_only(arena: Arena) -> None:
    place = arena.take(400)
    assert place is not None
    into = place.view(torch.float32)
    (read,) = decode(arrived(encode([Read(1, into=into)], arena)), arena)
    assert isinstance(read, Read)
    assert read.into is not None
    assert read.into.dtype is torch.float32
    assert (read.into.data_ptr(), read.into.nbytes) == (into.data_ptr(), 400)
    for shared, target in ((None, into), (arena, torch.zeros(4)), (arena, into[:0])):
        (read,) = decode(arrived(encode([Read(1, into=target)], shared)), shared)
        assert plain(read) == plain(Read(1))
    arena.give_back(place)


def test_large_tensors_are_copied_at_neither_end() -> None:
    values = torch.arange(5000, dtype=torch.bfloat16)
    frames = encode([Data(1, values)])
    values[0] = 7  # the frame is the tensor's memory …
    received = bytearray(frames[1])
    (read,) = decode([frames[0], memoryview(received)])
    assert isinstance(read, Data)
    assert read.values is not None
    assert read.values[0] == 7
    received[0:2] = bytes(2)  # … and the tensor that is read is the frame's
    assert read.values[0] == 0


def test_memory_that_cannot_be_written_is_copied() -> None:
    frames = [bytes(frame) for frame in encode([Data(1, torch.ones(5000))])]
    (read,) = decode(frames)
    assert isinstance(read, Data)
    assert read.values is not None
    read.values.fill_(2)  # not that one should
    (again,) = decode(frames)
    assert plain(again) == plain(Data(1, torch.ones(5000)))


def test_tensors_keep_alive_what_they_lie_in() -> None:
    frames = encode([Data(1, torch.arange(5000)), Data(2, torch.arange(10))])
    large, small = decode(arrived(frames))
    del frames
    gc.collect()
    junk = [bytes([255]) * 40000 for _ in range(50)]
    assert isinstance(large, Data)
    assert isinstance(small, Data)
    assert plain(large.values) == plain(torch.arange(5000))
    assert plain(small.values) == plain(torch.arange(10))
    del junk


def test_frames_that_are_not_aligned_are_read_all_the_same() -> None:
    values = torch.arange(5000, dtype=torch.float64)
    frames = arrived(encode([Data(1, values)]))
    askew = bytearray(1 + len(frames[1]))
    start = 1 if torch.frombuffer(askew, dtype=torch.uint8).data_ptr() % 8 == 0 else 0
    askew[start : start + len(frames[1])] = frames[1]
    (read,) = decode([frames[0], memoryview(askew)[start : start + len(frames[1])]])
    assert isinstance(read, Data)
    assert read.values is not None
    assert torch.equal(read.values, values)
    assert read.values.data_ptr() % 8 == 0


def test_a_tensor_that_is_too_long_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(payload, "MAX_FRAME_BYTES", 10_000)
    encode([Data(1, torch.zeros(2500))])
    with pytest.raises(UserError, match="10004 bytes cannot be sent: 10000"):
        encode([Data(1, torch.zeros(2501))])


def test_much_is_sent_in_several_pages(arena: Arena) -> None:
    shared = arena.take(2**19)
    assert shared is not None
    large = [Data(number, torch.full((2**19,), number)) for number in range(5)]  # of 4 MiB
    small = [Ack(number) for number in range(3)]
    sent = [*small, *large[:3], Data(9, shared), *small, Data(9, shared), *large[3:], *small]
    read = [decode(arrived(frames), arena) for frames in pages(sent, arena)]
    assert [len(page) for page in read] == [4, 1, 1, 6, 1, 3]
    assert [plain(one) for page in read for one in page] == [plain(one) for one in sent]
    assert list(pages([])) == []
    arena.give_back(shared)


SAMPLE: list[Message] = [
    Command(Kind.PUSH, 1, rows=torch.arange(3), values=torch.ones(3), text="rule"),
    Read(1, rows=torch.arange(4), text="norm"),
    Ack(1),
    Data(2, torch.ones(5000, dtype=torch.float16)),
    Data(3, torch.tensor([True, False])),
    Refused(4, Problem("no such täble")),
    Refused(5, Problem("NaN", Cause.NOT_FINITE)),
    Command(Kind.VOID, 3, 4, 5, 6, text="infinite", cause=Cause.NOT_FINITE),
    Moved(5, 6, 7),
    Forward(1, 2, 3, Command(Kind.PUT, 1, values=torch.ones(2000))),
    Done(1, 2, 3),
    Behind(3, 4, 5),
    Snapshot(1, 2, "{}", (torch.ones(3), torch.ones(1500))),
    Got(8, 9),
]
RECORD_AT = HEADER_BYTES
FLAG, HAS, TEXT_LENGTH = RECORD_AT + 2, RECORD_AT + 3, RECORD_AT + 4


def patched(
    message: Message, offset: int, content: bytes, arena: Arena | None = None
) -> list[memoryview]:
    frames = arrived(encode([message], arena))
    frames[0][offset : offset + len(content)] = content
    return frames


def entry(frames: list[memoryview], dtype: int, place: int, offset: int, length: int) -> None:
    """Overwrites what is said about the first tensor of the first message."""
    at = HEADER_BYTES + RECORD_BYTES
    payload.ENTRY.pack_into(frames[0], at, dtype, place, offset, length)


@pytest.mark.parametrize(
    ("offset", "content", "reason"),
    [
        (0, b"Elle", "begins with b'Elle'"),
        (4, b"\x63\x00", "version 99, and this is version 3"),
        (8, b"\xff\xff\xff\xff", "4294967295 messages"),
        (12, b"\xff\xff\xff\xff", "4294967295 tensors"),
        (16, b"\xff\xff\xff\xff", "do not take"),
        (20, b"\xff\xff\xff\xff", "do not take"),
        (RECORD_AT, b"\x0b", "no message of type 11"),
        (RECORD_AT + 1, b"\x08", "no command of kind 8"),
        (RECORD_AT + 1, b"\x00", "no command of kind 0"),
        (FLAG, b"\x02", "truth value is 2"),
        (HAS, b"\x04", "cannot have tensors 4"),
        (HAS, b"\x08", "cannot have tensors 8"),
        (HAS, b"\x01", "fewer tensors"),
        (TEXT_LENGTH, b"\x05", "ends at byte 5 of 4"),
        (TEXT_LENGTH, b"\x03", "1 bytes of text belong to no message"),
        (TEXT_LENGTH, b"\xff\xff\xff\xff", "ends at byte 4294967295 of 4"),
        (-1, b"\xff", "not UTF-8"),
    ],
)
def test_what_is_wrong_is_said(offset: int, content: bytes, reason: str) -> None:
    command = Command(Kind.TICK, 1, text="abcd")
    frames = arrived(encode([command]))
    offset %= len(frames[0])
    with pytest.raises(Malformed, match=reason):
        decode(patched(command, offset, content))


def test_a_cause_that_is_none() -> None:
    for message in (Refused(1, Problem("")), Command(Kind.VOID, 1, ticket=1)):
        frames = arrived(encode([message]))
        frames[0][HEADER_BYTES + RECORD_BYTES - 8] = 9
        with pytest.raises(Malformed, match="no cause 9 of a refusal"):
            decode(frames)


def test_types_have_only_their_own_tensors() -> None:
    for message in SAMPLE:
        if not isinstance(message, Command | Forward):
            with pytest.raises(Malformed, match="cannot have tensors"):
                decode(patched(message, HAS, b"\x07"))


@pytest.mark.parametrize(
    ("about", "reason"),
    [
        ((10, 0, 0, 400), "code 10"),
        ((4, 0, 0, 396), "not whole numbers"),
        ((0, 0, 0, 408), "ends at byte 408 of 400"),
        ((0, 0, 0, 2**63), "ends at byte"),
        ((0, 0, 0, 392), "8 bytes belong to no tensor"),
        ((0, 0, 8, 400), "place 0, offset 8"),
        ((0, 3, 0, 400), "place 3"),
        ((0, 1, 0, 400), "fewer frames"),
        ((0, 2, 0, 400), "400 bytes belong to no tensor"),
        ((0, 2, 2**20, 4), "outside"),
        ((0, 2, 2**63, 4), "outside"),
        ((0, 2, 0, 0), "outside"),
        ((0, 2, 0, 2**64 - 4), "outside"),
        ((0, 2, 2, 4), "not aligned"),
    ],
)
def test_what_is_wrong_with_a_tensor_is_said(
    arena: Arena, about: tuple[int, int, int, int], reason: str
) -> None:
    frames = arrived(encode([Data(1, torch.zeros(100))]))
    entry(frames, *about)
    with pytest.raises(Malformed, match=reason):
        decode(frames, arena)


def test_no_shared_memory_no_tensors_there(arena: Arena) -> None:
    place = arena.take(400)
    assert place is not None
    with pytest.raises(Malformed, match="not shared"):
        decode(arrived(encode([Data(1, place)], arena)))
    arena.give_back(place)


def test_answers_are_not_written_into_a_message(arena: Arena) -> None:
    frames = arrived(encode([Read(1, rows=torch.arange(3))]))
    frames[0][HAS] = 4  # what were rows
    with pytest.raises(Malformed, match="place 0"):
        decode(frames, arena)


def test_rows_are_int64() -> None:
    with pytest.raises(Malformed, match=r"torch\.int32"):
        decode(encode([Read(1, rows=torch.arange(3, dtype=torch.int32))]))


@pytest.mark.parametrize("length", [10, 5000])
def test_truth_values_are_0_or_1(length: int) -> None:
    frames = arrived(encode([Data(1, torch.full((length,), 2, dtype=torch.uint8))]))
    entry(frames, DTYPES.index(torch.bool), int(length > 4096), 0, length)
    with pytest.raises(Malformed, match="neither 0 nor 1"):
        decode(frames)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda frames: [], "no header"),
        (lambda frames: [frames[0][: HEADER_BYTES - 1]], "no header"),
        (lambda frames: [frames[0][:-1], *frames[1:]], "do not take"),
        (lambda frames: frames[:-1], "fewer frames"),
        (lambda frames: [*frames, memoryview(b"")], "1 frames belong to no tensor"),
        (lambda frames: [frames[0], frames[2], frames[1]], "bytes, its tensor"),
        (lambda frames: [frames[0], frames[1][:-2], *frames[2:]], "9998 bytes, its tensor 10000"),
    ],
)
def test_frames_must_fit(
    change: Callable[[list[memoryview]], list[memoryview]], reason: str
) -> None:
    with pytest.raises(Malformed, match=reason):
        decode(change(arrived(encode(SAMPLE))))


@settings(max_examples=300)
@given(st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), min_size=1, max_size=4))
def test_altered_messages_are_messages_or_malformed(
    arena: Arena, changes: list[tuple[int, int]]
) -> None:
    """Nothing else is ever raised. (A number can be altered unnoticed: seals are for that.)"""
    frames = arrived(encode(SAMPLE))
    for place, byte in changes:
        frames[0][place % len(frames[0])] = byte
    try:
        read = decode(frames, arena)
    except Malformed:
        return
    assert len(read) == len(SAMPLE)


@given(st.lists(st.binary(max_size=200), max_size=4), st.booleans())
def test_random_bytes_are_malformed(frames: list[bytes], begin_well: bool) -> None:
    if begin_well and frames:
        frames[0] = encode([])[0][:8] + frames[0]
    with pytest.raises(Malformed):
        decode(frames)


def test_a_list_of_rows_travels_once():
    sender, receiver = KeySender(1 << 20), KeyReceiver(1 << 20)
    rows = torch.arange(0, 9000, 3)
    sizes = []
    for _ in range(3):
        frames = encode([Read(1, rows=rows)], None, sender)
        sizes.append(sum(len(frame) for frame in frames))
        (read,) = decode(frames, None, receiver)
        assert torch.equal(read.rows, rows)
    assert sizes[0] > rows.nbytes
    assert sizes[1] == sizes[2] < 300
    assert sender.saved_bytes == 2 * (rows.nbytes - 16)


def test_a_digest_that_nobody_knows_is_told_apart():
    sender = KeySender(1 << 20)
    rows = torch.arange(100)
    encode([Read(1, rows=rows)], None, sender)
    with pytest.raises(UnknownKeys):
        decode(encode([Read(1, rows=rows)], None, sender), None, KeyReceiver(1 << 20))
