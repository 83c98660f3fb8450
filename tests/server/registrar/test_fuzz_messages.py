"""Whatever holders of the key say to the registrar: it is understood or dropped whole."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import pytest
import zmq
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from farandole.server.protocol.control import ControlLine
from farandole.server.protocol.payload import Malformed
from farandole.server.registrar.messages import kind_of
from farandole.server.registrar.registrar import Registrar
from farandole.server.registrar.service import RegistrarService

KEY = b"k" * 32
SAID = ["hello", "facts", "confirmed", "reshaped", "meet", "missing", "mark", "enter", "bye"]
quick = settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)

values = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-3, 40),
        st.sampled_from([2**62, 2**64, 10**30, -(2**63)]),
        st.floats(),
        st.text(max_size=8),
        st.sampled_from(["server", "worker", "guest", "late", "tcp://127.0.0.1:1", "tcp://", "t"]),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=6,
)
words = st.sampled_from([*SAID, "address", "rank", "late", "job", "of", "held", "x"])
said = st.dictionaries(words, values, min_size=1, max_size=5)


@quick
@given(said)
@example({"hello": "worker", "rank": 0, "of": 10**12})
@example({"hello": "server", "address": "tcp://nowhere"})
@example({"hello": "server", "address": 5})
@example({"confirmed": 1, "held": [[0, 1], [2]]})
@example({"reshaped": [[], {}]})
def test_a_message_is_of_a_kind_or_malformed(message):
    with contextlib.suppress(Malformed):
        assert kind_of(message) in message


class Meeting:
    """A registrar, and a guest who can tell when it has heard everything."""

    def __init__(self) -> None:
        self.registrar = Registrar(1, 0)
        self.desk = RegistrarService(self.registrar, KEY)
        self.context: zmq.Context[Any] = zmq.Context()
        self.line = ControlLine(self.context, KEY, self.desk.address)
        self.line.send({"hello": "guest"})
        self.await_answer("you")

    def await_answer(self, word: str) -> None:
        deadline = time.monotonic() + 300
        while time.monotonic() < deadline:
            if self.line.socket.poll(1000):
                heard = self.line.receive()
                if heard is not None and word in heard[0]:
                    return
        raise AssertionError(f"no {word!r}")

    def sync(self) -> None:
        """Everything before this has been heard."""
        self.line.send({"facts": {}})
        self.await_answer("beat")

    def close(self) -> None:
        self.line.close()
        self.context.term()
        self.desk.close()


@pytest.fixture(scope="module")
def meeting() -> Iterator[Meeting]:
    made = Meeting()
    yield made
    made.close()


@quick
@given(said)
@example({"hello": "worker", "rank": "x"})
@example({"meet": "name"})
@example({"enter": True})
@example({"confirmed": 1, "held": []})
def test_the_registrar_drops_what_it_cannot_take_and_goes_on(meeting, message):
    try:
        kind = kind_of(message)
    except Malformed:
        kind = ""
    if kind in ("hello", "bye", "facts"):
        return  # a guest may say these
    before, facts = meeting.registrar.view, meeting.desk.facts()
    meeting.line.send(message)
    meeting.sync()
    assert meeting.registrar.view == before
    assert meeting.desk.facts() == facts
    assert any("the registrar drops" in line for line in meeting.desk.take_lines())


@quick
@given(st.lists(st.binary(max_size=60), max_size=4))
@example([b"[" * 20_000, b""])
@example([b"5", b""])
def test_frames_that_are_no_message(meeting, frames):
    before = meeting.registrar.view
    meeting.line.socket.send_multipart(frames or [b""])
    meeting.sync()
    assert meeting.registrar.view == before
