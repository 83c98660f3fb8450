"""Arbitrary bytes, and good messages with something wrong: whatever a server reads, it raises what
it says that it raises, holds little, and what it refuses changes nothing."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from farandole.errors import CommError, FarandoleError, UserError
from farandole.server.node.node import Node
from farandole.server.protocol.handshake import Hello, NotWelcome, Welcome, client_seal, server_seal
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
from farandole.server.protocol.payload import Malformed
from farandole.server.protocol.seal import BadSeal
from farandole.server.protocol.sockets import FRAME_BYTES, cut, joined
from farandole.server.protocol.views import Chain, Reshape, View
from farandole.server.protocol.wire import decode, encode
from farandole.server.rules import parse_question, parse_rule
from farandole.server.tables import Table

KEY = b"k" * 32
ME, BEFORE, AFTER = 2, 1, 3
TABLE = Table("t", 4, 2, "float32", "sgd:momentum=0.9", 4, 1)
ENCODED = Table("e", 4, 2, "float32", "add", 4, 1, codec="int8")
WHOLE = Table("r", 4, 2, "float32", "add", 4, 1, rounds=True)
quick = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])

edges = st.sampled_from([-(2**63), -(2**62), -2, -1, 0, 1, 2, 3, 4, 5, 2**31, 2**62, 2**63 - 1])
numbers = st.one_of(st.integers(-3, 9), edges)
dtypes = st.sampled_from([torch.float32, torch.float64, torch.int64, torch.uint8, torch.bool])
texts = st.one_of(
    st.text(max_size=12),
    st.sampled_from(["", "sum", "updates", "description", "[1, 2]", "{", "os.abort"]),
    # Made when they are drawn: Hypothesis would show them whole wherever it shows the strategy.
    st.sampled_from("9[").map(lambda letter: letter * 5000),
    st.sampled_from([TABLE, ENCODED, WHOLE]).map(Table.to_json),
    st.fixed_dictionaries(
        {
            "name": st.sampled_from(["t", "u", "", 5]),
            "rows": st.sampled_from([0, 1, 4, 2**40, 2**70, -1, 1.5]),
            "width": st.sampled_from([1, 2, 2**62]),
            "dtype": st.sampled_from(["float32", "int64", "complex64"]),
            "rule": st.sampled_from(["add", "sgd", "adam:x=1", "os.abort", ":"]),
            "block_rows": st.sampled_from([1, 4, 2**40]),
            "ranges": st.sampled_from([1, 7]),
            "rounds": st.booleans(),
            "codec": st.sampled_from(["", "int8", "topk:0.5", "nothing"]),
        }
    ).map(json.dumps),
)
tables = st.one_of(st.sampled_from([TABLE.id, ENCODED.id, WHOLE.id]), numbers)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    values = draw(st.lists(st.integers(-3, 5), max_size=9))
    made = torch.tensor(values).to(draw(dtypes))
    if made.is_floating_point() and len(values) and draw(st.booleans()):
        made[0] = draw(st.sampled_from([float("nan"), float("inf"), 3e38]))
    return made


rates = st.floats(width=32)
maybe = st.one_of(st.none(), tensors())
rows = st.one_of(st.none(), st.lists(st.integers(-2, 5), max_size=4).map(torch.LongTensor))
commands = st.builds(
    Command,
    kind=st.sampled_from(Kind),
    range=st.one_of(st.just(0), numbers),
    sender=numbers,
    number=st.one_of(st.integers(0, 4), numbers),
    ticket=numbers,
    table=tables,
    start=numbers,
    stop=numbers,
    rows=rows,
    values=maybe,
    slot=numbers,
    rate=rates,
    clock=numbers,
    ticks=st.booleans(),
    text=texts,
    cause=st.sampled_from(Cause),
)
reads = st.builds(
    Read,
    range=st.one_of(st.just(0), numbers),
    sender=numbers,
    number=numbers,
    ticket=numbers,
    table=tables,
    start=numbers,
    stop=numbers,
    rows=rows,
    slot=numbers,
    needs=numbers,
    rounds=st.booleans(),
    view=numbers,
    text=texts,
)
of_server = st.one_of(
    st.builds(Forward, numbers, st.one_of(st.just(1), numbers), numbers, commands),
    st.builds(Done, numbers, numbers, numbers),
    st.builds(Behind, numbers, numbers, numbers),
    st.builds(Got, numbers, numbers),
    st.builds(Snapshot, numbers, numbers, texts, st.lists(tensors(), max_size=3).map(tuple)),
)
answers = st.one_of(
    st.builds(Ack, numbers, numbers),
    st.builds(Data, numbers, maybe, numbers),
    st.builds(Refused, numbers, st.builds(Problem, st.text(), st.sampled_from(Cause))),
    st.builds(Moved, numbers, numbers, numbers),
)
messages = st.one_of(commands, reads, of_server, answers)


@st.composite
def damaged(draw: st.DrawFn, frames: list[bytes]) -> list[bytes]:
    """One to three things wrong with good frames."""
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(frames) - 1)) if frames else 0
        frame = bytearray(frames[at]) if frames else bytearray()
        how = draw(st.sampled_from(["flip", "cut", "grow", "drop", "twice", "number"]))
        place = draw(st.integers(0, max(0, len(frame) - 1)))
        if how == "flip" and frame:
            frame[place] ^= 1 << draw(st.integers(0, 7))
        elif how == "number" and len(frame) >= 8:
            big = draw(st.sampled_from([0, 1, 2**31, 2**32 - 1, 2**62, 2**64 - 1]))
            place = min(place // 4 * 4, len(frame) - 8)
            frame[place : place + 8] = big.to_bytes(8, "little")
        elif how == "cut":
            del frame[place:]
        elif how == "grow":
            frame += draw(st.binary(max_size=40))
        changed = {"drop": [], "twice": [bytes(frame)] * 2}.get(how, [bytes(frame)])
        frames = [*frames[:at], *changed, *frames[at + 1 :]]
    return frames


def read(frames: list[bytes]) -> list[Message]:
    """What they are, if anything; in little memory."""
    tracemalloc.start()
    try:
        found = decode(frames)
    except Malformed:
        found = []
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < 100_000 + 20 * sum(map(len, frames))
    return found


@quick
@given(st.lists(st.binary(max_size=200), max_size=4))
def test_arbitrary_frames_are_read_or_malformed(frames):
    read(frames)
    read([b"FdMs" + frame for frame in frames])


@quick
@given(st.data(), st.lists(messages, min_size=1, max_size=3))
def test_damaged_messages_are_read_or_malformed(data, sent):
    frames = [bytes(frame) for frame in encode(sent)]
    assert len(decode(frames)) == len(sent)
    for message in read(data.draw(damaged(frames))):
        encode([message])  # what was read can be passed on


@quick
@given(st.binary(max_size=150), st.data())
def test_greetings_and_seals(garbage, data):
    hello = Hello.make("worker", None)
    welcome = Welcome.make("")
    good = hello.encode(KEY)
    for frame in (garbage, b"FdHi" + garbage, *data.draw(damaged([good]))):
        if frame != good:
            with pytest.raises(NotWelcome):
                Hello.decode(frame, KEY)
    with pytest.raises(NotWelcome):
        Welcome.decode(b"FdWe" + garbage, KEY, hello)
    sender, taker = client_seal(KEY, hello, welcome), server_seal(KEY, hello, welcome)
    frames = [garbage, b"more"]
    sealed = [sender.sign(frames), *frames]
    broken = data.draw(damaged(sealed))
    if broken != sealed:
        with pytest.raises(BadSeal):
            taker.check(memoryview(broken[0] if broken else b""), broken[1:])
    taker.check(memoryview(sealed[0]), frames)  # and the good one is still the next


@pytest.mark.parametrize(
    ("name", "arena", "server"),
    [(5, None, None), ("", [], None), ("", "x", None), ("", None, "x"), ("", None, True)],
)
def test_a_greeting_with_the_key_that_says_nonsense(name, arena, server):
    with pytest.raises(NotWelcome):
        Hello.decode(Hello(bytes(16), name, arena, server).encode(KEY), KEY)


@quick
@given(st.lists(st.integers(0, 2 * FRAME_BYTES + 2), max_size=4))
@example([FRAME_BYTES, 2 * FRAME_BYTES, 0, FRAME_BYTES - 1])
def test_frames_that_are_cut_are_joined_again(lengths):
    frames = [bytes([index + 1]) * length for index, length in enumerate(lengths)]
    parts = [memoryview(bytes(part)) for part in cut(frames)]
    assert all(len(part) <= FRAME_BYTES for part in parts)
    assert [bytes(frame) for frame in joined(parts)] == frames


@quick
@given(st.lists(st.sampled_from([0, 1, FRAME_BYTES - 1, FRAME_BYTES, FRAME_BYTES + 1]), max_size=5))
def test_parts_that_nobody_cut_are_joined_somehow(lengths):
    parts = [memoryview(bytes(length)) for length in lengths]
    assert sum(map(len, joined(parts))) == sum(lengths)


def made_node() -> Node:
    """In the middle of the chain of range 0, with tables; a head of range 1."""
    node = Node(ME, parse_rule, parse_question)
    where = {BEFORE: "a", ME: "b", AFTER: "c"}
    node.take_view(View(1, where, (Chain(1, (BEFORE, ME, AFTER)), Chain(1, (ME,)))))
    for index, table in enumerate((TABLE, ENCODED, WHOLE), 1):
        created = Command(Kind.CREATE, 0, 9, index, text=table.to_json())
        node.receive(BEFORE, Forward(0, 1, index, created))
        node.receive(b"client", Command(Kind.CREATE, 1, 9, index, text=table.to_json()))
    assert all(len(held.range.shards) == 3 for held in node.copies.values())
    return node


def values_of(node: Node) -> dict[int, Any]:
    """All tensors, and what else a refused command does not change: only its number is had."""
    found = {}
    for number, held in node.copies.items():
        text, tensors = held.range.state()
        state = json.loads(text)
        del state["version"], state["had"]
        kept = [table for table in state["shards"] if table["tensors"] or table["round"]]
        found[number] = [kept, state["clocks"], [t.tolist() for t in tensors if t.count_nonzero()]]
    return found


@quick
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just(b"client"), st.one_of(messages, commands, reads)),
            st.tuples(st.sampled_from([BEFORE, AFTER, 77]), st.one_of(messages, of_server)),
            st.tuples(
                st.just("registrar"),
                st.builds(Reshape, numbers, numbers, st.lists(numbers, max_size=3).map(tuple)),
            ),
        ),
        max_size=6,
    )
)
def test_a_server_survives_any_message_from_anyone(said):
    node = made_node()
    for sender, message in said:
        before = values_of(node)
        held = set(node.copies)
        try:
            node.receive(sender, message)
        except CommError:
            assert values_of(node) == before
        out = [outgoing.message for outgoing in node.take_outbox()]
        encode([one for one in out if isinstance(one, Message)])  # all of it can be sent
        refused = any(isinstance(one, Refused) for one in out)
        if refused and len(out) == 1 and isinstance(message, Read):
            assert values_of(node) == before
        assert set(node.copies) >= held


@pytest.mark.parametrize(
    ("command", "why"),
    [
        (Command(Kind.TICK, 1, 9, 4, clock=2**63 - 1), "is no clock"),
        (
            Command(Kind.PUT, 1, 9, 4, table=TABLE.id, values=torch.ones(0), text="9" * 5000),
            "is not a number of updates",
        ),
        (Command(Kind.PUSH, 1, 9, 4, table=TABLE.id, stop=4, values=torch.ones(3)), "3 of torch"),
        (Command(Kind.MEMBERS, 1, 9, 4, text="nobody"), "not for clients to say"),
    ],
)
def test_a_refused_command_leaves_the_values_alone(command, why):
    node = made_node()
    push = Command(Kind.PUSH, 1, 8, 1, table=TABLE.id, stop=4, values=torch.ones(8))
    node.receive(b"client", push)
    list(node.take_outbox())
    before = values_of(node)
    node.receive(b"client", command)
    (answer,) = (outgoing.message for outgoing in node.take_outbox())
    assert isinstance(answer, Refused)
    assert why in answer.problem.text
    assert values_of(node) == before


def test_a_table_for_which_there_is_no_memory_is_refused_when_it_is_written_to():
    node = made_node()
    huge = Table("huge", 2**50, 1, "float32", "add", 2**50, 1)
    node.receive(b"client", Command(Kind.CREATE, 1, 9, 4, text=huge.to_json()))
    push = Command(Kind.PUSH, 1, 9, 5, table=huge.id, stop=1, values=torch.ones(1))
    list(node.take_outbox())
    node.receive(b"client", push)
    (answer,) = (outgoing.message for outgoing in node.take_outbox())
    assert isinstance(answer, Refused)
    assert f"no memory for 1 × {2**52} bytes" in answer.problem.text


@pytest.mark.parametrize(
    "message",
    [
        Snapshot(0, 9, "no JSON", ()),
        Snapshot(0, 9, "{}", ()),
        Snapshot(0, 9, "[" * 10_000, ()),
        Snapshot(5, 9, "{}", ()),
        Snapshot(-1, 9, "{}", ()),
        Forward(0, 1, 4, Command(Kind.PUSH, 0, 9, 4, table=12345, values=torch.ones(8))),
        Forward(0, 1, 4, Command(Kind.PUSH, 0, 9, 4, table=TABLE.id, stop=9, values=torch.ones(8))),
        Forward(0, 1, 4, Command(Kind.MEMBERS, 0, text="{")),
        Forward(0, 1, 4, Command(Kind.CREATE, 0, 9, 4, text="{")),
    ],
)
def test_nonsense_from_another_server_is_malformed_and_changes_nothing(message):
    node = made_node()
    before = values_of(node), node.copies[0].range.version
    with pytest.raises(Malformed):
        node.receive(BEFORE, message)
    assert (values_of(node), node.copies[0].range.version) == before


def test_all_that_these_raise_is_in_the_tree_of_errors():
    for error in (Malformed, BadSeal, NotWelcome, UserError):
        assert issubclass(error, FarandoleError)
