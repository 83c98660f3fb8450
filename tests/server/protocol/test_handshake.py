"""Greetings: only holders of the key get through, and each connection has keys of its own."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farandole.server.protocol.handshake import (
    VERSION,
    Hello,
    NotWelcome,
    Welcome,
    client_seal,
    server_seal,
)
from farandole.server.protocol.seal import BadSeal

KEY, OTHER = b"k" * 32, b"o" * 32
ARENA = {"pid": 1, "token": "00ff"}


@pytest.mark.parametrize("arena", [None, ARENA])
def test_both_ends_get_the_same_keys(arena: dict[str, object] | None) -> None:
    hello = Hello.make("worker 3 – Zürich", arena)
    heard = Hello.decode(hello.encode(KEY), KEY)
    assert heard == hello
    welcome = Welcome.make("it is on another host")
    answered = Welcome.decode(welcome.encode(KEY, heard), KEY, hello)
    assert answered == welcome
    client, server = client_seal(KEY, hello, answered), server_seal(KEY, heard, welcome)
    server.check(memoryview(client.sign([b"to the server"])), [b"to the server"])
    client.check(memoryview(server.sign([b"to the client"])), [b"to the client"])


def test_what_one_end_says_is_not_taken_for_the_others_word() -> None:
    hello, welcome = Hello.make("", None), Welcome.make("")
    for end in (client_seal, server_seal):
        said = end(KEY, hello, welcome).sign([b"said"])
        with pytest.raises(BadSeal):
            end(KEY, hello, welcome).check(memoryview(said), [b"said"])


def test_two_connections_have_different_keys() -> None:
    hello = Hello.make("", None)
    first, second = Welcome.make(""), Welcome.make("")
    seal = client_seal(KEY, hello, first).sign([b"said"])
    with pytest.raises(BadSeal):
        server_seal(KEY, hello, second).check(memoryview(seal), [b"said"])
    again = Hello.make("", None)
    with pytest.raises(BadSeal):
        server_seal(KEY, again, first).check(memoryview(seal), [b"said"])


def test_another_key() -> None:
    hello = Hello.make("", ARENA)
    with pytest.raises(NotWelcome, match="another key"):
        Hello.decode(hello.encode(OTHER), KEY)
    with pytest.raises(NotWelcome, match="another key"):
        Welcome.decode(Welcome.make("").encode(OTHER, hello), KEY, hello)


def test_a_welcome_to_another_hello() -> None:
    old, new = Hello.make("", None), Hello.make("", None)
    with pytest.raises(NotWelcome, match="another key"):
        Welcome.decode(Welcome.make("").encode(KEY, old), KEY, new)


def test_another_version_says_which() -> None:
    frame = bytearray(Hello.make("", None).encode(KEY))
    frame[4:6] = (VERSION + 1).to_bytes(2, "little")
    with pytest.raises(NotWelcome, match="unknown version") as refused:
        Hello.decode(bytes(frame), KEY)
    assert refused.value.answer == f"version {VERSION}"


@given(st.data())
def test_nothing_that_is_altered_or_cut_is_a_greeting(data: st.DataObject) -> None:
    frame = Hello.make("", ARENA).encode(KEY)
    cut = data.draw(st.integers(0, len(frame) - 1))
    bit = data.draw(st.integers(0, 8 * len(frame) - 1))
    altered = bytearray(frame)
    altered[bit // 8] ^= 1 << bit % 8
    for wrong in (frame[:cut], bytes(altered), frame + b"\0", data.draw(st.binary())):
        with pytest.raises(NotWelcome):
            Hello.decode(wrong, KEY)


def test_one_kind_of_greeting_is_not_taken_for_the_other() -> None:
    hello = Hello.make("", None)
    with pytest.raises(NotWelcome, match="malformed"):
        Welcome.decode(hello.encode(KEY), KEY, hello)
    as_welcome = b"FdWe" + hello.encode(KEY)[4:]
    with pytest.raises(NotWelcome, match="another key"):
        Welcome.decode(as_welcome, KEY, hello)
