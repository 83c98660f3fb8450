"""Ports and lines over real sockets: good messages arrive, whatever else comes in between."""

from __future__ import annotations

import os
import random
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import zmq

from farandole.errors import UserError
from farandole.server.channels import Line, Port
from farandole.server.node.admission import Admission, credentials
from farandole.server.protocol.arena import Arena
from farandole.server.protocol.handshake import VERSION, Hello, Welcome
from farandole.server.protocol.messages import Ack, Command, Data, Kind, Message, Read

KEY, OTHER = b"k" * 32, b"o" * 32
PATIENCE_SECONDS = 300.0
ECHO = Path(__file__).parent / "scripts" / "ask.py"
Parts = list[bytes]


def wait_for(step: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not step():
        assert time.monotonic() < deadline, f"in {PATIENCE_SECONDS:g} s never: {what}"
        time.sleep(0.001)


class Ends:
    """A port and everything that it has received; lines, and what each of them has received."""

    def __init__(self, context: zmq.Context[Any]) -> None:
        self.context = context
        self.port = Port(KEY)
        self.lines: list[Line] = []
        self.heard: list[tuple[bytes, Message]] = []
        self.answers: dict[Line, list[Message]] = {}

    def line(self, key: bytes = KEY, address: str | None = None, **options: Any) -> Line:
        line = Line(self.context, key, address or self.port.address, **options)
        self.lines.append(line)
        self.answers[line] = []
        return line

    def pump(self) -> None:
        for peer, messages in self.port.receive():
            self.heard += [(peer, message) for message in messages]
        for line in self.lines:
            self.answers[line] += line.receive()

    def until(self, condition: Callable[[], object], what: str) -> None:
        def step() -> bool:
            self.pump()
            return bool(condition())

        wait_for(step, what)

    def numbers(self) -> list[int]:
        """The tickets of the commands that were heard."""
        return [message.ticket for _, message in self.heard if isinstance(message, Command)]

    def assert_works(self) -> None:
        """One who comes now is served."""
        line = self.line()
        ticket = 10**6 + len(self.heard)
        line.send([push(ticket)])
        self.until(lambda: ticket in self.numbers(), "a new client is heard")
        (peer,) = (
            peer for peer, message in self.heard if getattr(message, "ticket", None) == ticket
        )
        self.port.send(peer, [Ack(ticket)])
        self.until(lambda: self.answers[line], "and answered")
        assert self.answers[line] == [Ack(ticket)]
        self.lines.remove(line)
        line.close()

    def restart(self) -> None:
        self.move_to(self.port.address)

    def move_to(self, address: str) -> None:
        self.port.close()

        def bound() -> bool:
            try:
                self.port = Port(KEY, address)
            except UserError:  # zmq closes sockets in a thread of its own
                return False
            return True

        wait_for(bound, "the address is free again")
        assert self.port.address == address


class KeepingContext(zmq.Context[Any]):
    """Keeps its sockets, so that all of them can be closed at the end."""

    def socket(self, *arguments: Any, **options: Any) -> Any:
        made = super().socket(*arguments, **options)
        self.__dict__.setdefault("kept", []).append(made)
        return made


@pytest.fixture
def context() -> Iterator[zmq.Context[Any]]:
    context = KeepingContext()
    yield context
    context.destroy(linger=0)


@pytest.fixture
def ends(context: zmq.Context[Any]) -> Iterator[Ends]:
    ends = Ends(context)
    yield ends
    for line in ends.lines:
        line.close()
    ends.port.close()


class Impostor:
    """Listens where a server should, lets in whoever has the job's key, and says what it likes."""

    def __init__(self) -> None:
        self.context: zmq.Context[Any] = zmq.Context()
        self._admission = Admission(self.context, KEY)
        self.socket = self.context.socket(zmq.ROUTER)
        self.socket.linger = 0
        self.socket.plain_server = True
        number = self.socket.bind_to_random_port("tcp://127.0.0.1")
        self.address = f"tcp://127.0.0.1:{number}"
        self._admission.open(self.address)

    def close(self) -> None:
        self.socket.close()
        self.context.term()


@pytest.fixture
def impostor() -> Iterator[Impostor]:
    made = Impostor()
    yield made
    if not made.socket.closed:
        made.close()


def push(ticket: int, values: torch.Tensor | None = None) -> Command:
    return Command(Kind.PUSH, 1, ticket=ticket, values=values)


def raw(context: zmq.Context[Any], address: str) -> zmq.Socket[Any]:
    """One who speaks zmq and is let in, and nothing more."""
    dealer = context.socket(zmq.DEALER)
    dealer.linger = 0
    dealer.plain_username, dealer.plain_password = credentials(KEY, address)
    dealer.connect(address)
    return dealer


def test_messages_go_both_ways_in_order(ends: Ends) -> None:
    line = ends.line(name="worker 3")
    assert not line.ready
    for ticket in range(3):
        line.send([push(ticket), push(100 + ticket)])  # kept until the Welcome
    ends.until(lambda: len(ends.heard) == 6, "six messages")
    assert line.ready
    for ticket in range(3, 6):
        line.send([push(ticket), push(100 + ticket)])
    ends.until(lambda: len(ends.heard) == 12, "twelve messages")
    assert ends.numbers() == [n for ticket in range(6) for n in (ticket, 100 + ticket)]
    peer = ends.heard[0][0]
    assert ends.port.name_of(peer) == "worker 3"
    ends.port.send(peer, [Ack(1), Ack(2)])
    ends.port.send(peer, [Ack(3)])
    ends.until(lambda: len(ends.answers[line]) == 3, "answers")
    assert ends.answers[line] == [Ack(1), Ack(2), Ack(3)]
    assert (line.refused, line.sessions) == (None, 1)
    assert not ends.port.drops
    assert not line.drops


def test_many_clients_are_told_apart(ends: Ends) -> None:
    lines = [ends.line(name=str(number)) for number in range(5)]
    for number, line in enumerate(lines):
        line.send([push(number)])
    ends.until(lambda: len(ends.heard) == 5, "all")
    for peer, message in ends.heard:
        assert isinstance(message, Command)
        assert ends.port.name_of(peer) == str(message.ticket)
        ends.port.send(peer, [Ack(message.ticket)])
    ends.until(lambda: all(ends.answers.values()), "answers")
    assert [ends.answers[line] for line in lines] == [[Ack(number)] for number in range(5)]


@pytest.mark.parametrize("length", [10, 5_000, 100_000, 3_000_000])
def test_tensors_of_all_lengths(ends: Ends, length: int) -> None:
    values = torch.arange(length, dtype=torch.float32)
    line = ends.line()
    line.send([push(1, values), push(2, values.to(torch.bfloat16))])
    ends.until(lambda: len(ends.heard) == 2, "the tensors")
    (peer, first), (_, second) = ends.heard
    assert isinstance(first, Command)
    assert isinstance(second, Command)
    assert first.values is not None
    assert second.values is not None
    assert torch.equal(first.values, values)
    assert torch.equal(second.values, values.to(torch.bfloat16))
    tracker = ends.port.send(peer, [Data(1, first.values)], track=True)
    assert (tracker is None) == (length * 4 < 64 * 1024), "small ones are copied at once"
    ends.until(lambda: ends.answers[line], "the answer")
    (answer,) = ends.answers[line]
    assert isinstance(answer, Data)
    assert answer.values is not None
    assert torch.equal(answer.values, values)
    if tracker is not None:
        ends.until(lambda: tracker.done, "the memory is free again")


def test_shared_memory_is_used_where_it_can_be(ends: Ends) -> None:
    arena = Arena.make(2**20)
    line = ends.line(arena=arena)
    taken, into = arena.take(400), arena.take(400)
    assert taken is not None
    assert into is not None
    line.send([push(1, taken), Read(1, into=into)])
    ends.until(lambda: len(ends.heard) == 2, "both")
    assert line.unshared == ""
    (peer, command), (_, read) = ends.heard
    assert isinstance(command, Command)
    assert isinstance(read, Read)
    assert command.values is not None
    assert read.into is not None
    taken.fill_(5)
    read.into.fill_(6)
    assert (command.values == 5).all()
    assert (into == 6).all()
    ends.port.send(peer, [Data(1, read.into)])
    ends.until(lambda: ends.answers[line], "the answer")
    (answer,) = ends.answers[line]
    assert isinstance(answer, Data)
    assert answer.values is not None
    assert answer.values.data_ptr() == into.data_ptr()
    arena.close()


def test_shared_memory_that_cannot_be_opened_is_done_without(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    arena = Arena.make(2**20)
    described = arena.describe() | {"boot": "another"}
    monkeypatch.setattr(arena, "describe", lambda: described)
    line = ends.line(arena=arena)
    taken = arena.take(400)
    assert taken is not None
    taken.fill_(5)
    line.send([push(1, taken), Read(1, into=taken)])
    ends.until(lambda: len(ends.heard) == 2, "both")
    assert line.unshared == "it is on another host"
    (_, command), (_, read) = ends.heard
    assert isinstance(command, Command)
    assert command.values is not None
    assert command.values.tolist() == [5] * 400
    assert isinstance(read, Read)
    assert read.into is None
    arena.close()


def test_another_process_and_its_shared_memory(ends: Ends, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_bytes(KEY)
    key.chmod(0o600)
    with subprocess.Popen(
        [sys.executable, ECHO, key, ends.port.address],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
    ) as process:
        ends.until(lambda: len(ends.heard) == 3, "its messages")
        (peer, shared), (_, sent), (_, read) = ends.heard
        for message in (shared, sent):
            assert isinstance(message, Command)
            assert message.values is not None
            assert torch.equal(message.values, torch.arange(100_000.0))
        assert isinstance(read, Read)
        assert read.into is not None
        read.into.fill_(9)
        ends.port.send(peer, [Data(read.ticket)])
        output, _ = process.communicate(timeout=PATIENCE_SECONDS)
    assert output.split() == ["shared", "900000.0"]
    assert process.returncode == 0


def test_a_port_that_is_taken_says_so(ends: Ends) -> None:
    with pytest.raises(UserError, match=f"cannot listen on {ends.port.address}: Address already"):
        Port(KEY, ends.port.address)


@pytest.mark.parametrize("address", ["nonsense", "tcp://", "tcp://127.0.0.1", "udp://127.0.0.1:1"])
def test_addresses_that_are_none(context: zmq.Context[Any], address: str) -> None:
    with pytest.raises(UserError, match=f"cannot listen on {address}: "):
        Port(KEY, address)
    with pytest.raises(UserError, match=f"cannot connect to {address}: "):
        Line(context, KEY, address)


def test_it_listens_on_loopback_unless_told_otherwise(ends: Ends) -> None:
    host, port = ends.port.address.removeprefix("tcp://").split(":")
    assert host == "127.0.0.1"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", int(port)), timeout=10)


def test_another_key_is_refused_and_explained(ends: Ends) -> None:
    stranger = ends.line(OTHER)
    stranger.send([push(1)])
    ends.until(lambda: stranger.refused, "a refusal")
    assert stranger.refused is not None
    assert ends.port.address in stranger.refused
    assert "another job's key" in stranger.refused
    assert not stranger.ready
    assert not ends.heard
    assert set(ends.port.drops) == {"another key"}
    ends.assert_works()


def test_another_version_is_refused_and_explained(ends: Ends) -> None:
    hello = bytearray(Hello.make("", None).encode(KEY))
    hello[4:6] = (99).to_bytes(2, "little")
    newer = raw(ends.context, ends.port.address)
    newer.send(bytes(hello))
    ends.until(lambda: newer.poll(0), "an answer")
    assert newer.recv() == b"FdNo" + f"version {VERSION}".encode()
    assert ends.port.drops == {"unknown version": 1}
    ends.assert_works()


@pytest.mark.parametrize(
    ("word", "text"),
    [
        ("version 7", f"version 7 of the protocol, and this is version {VERSION}"),
        ("no greeting", "says 'no greeting'"),
        ("\x00\xff" * 500, "says '"),
    ],
)
def test_a_refusal_explains_but_a_later_welcome_counts(
    ends: Ends, impostor: Impostor, word: str, text: str
) -> None:
    """For a while another server has the port; then the right one comes."""
    line = ends.line(address=impostor.address)
    peer, _ = impostor.socket.recv_multipart()
    impostor.socket.send_multipart([peer, b"FdNo" + word.encode("latin-1")])
    wait_for(lambda: not line.receive() and line.refused is not None, "a refusal")
    assert line.refused is not None
    assert text in line.refused
    assert len(line.refused) < 500
    impostor.close()
    ends.move_to(impostor.address)
    ends.until(lambda: line.ready, "the Welcome")
    assert line.refused is None


def free_port() -> int:
    """A port that is bound twice in a row. It is not one of those that the system gives to the
    connections of others, which would take it in between."""
    while True:
        port = random.randrange(20_000, 32_000)
        with socket.socket() as tried, suppress(OSError):
            tried.bind(("127.0.0.1", port))
            return port


@pytest.mark.parametrize("whose", ["of another job", "of another kind"])
def test_who_is_cut_off_by_a_stranger_comes_back(ends: Ends, whose: str) -> None:
    """zmq does not connect again by itself after it was refused."""
    address = f"tcp://127.0.0.1:{free_port()}"
    if whose == "of another job":
        stranger = Port(OTHER, address)
    else:
        context: zmq.Context[Any] = zmq.Context()
        plain = context.socket(zmq.ROUTER)  # without a mechanism
        plain.bind(address)
    line = ends.line(address=address)
    line.send([push(1)])
    ends.until(lambda: line.refused, "a refusal")
    assert address in str(line.refused)
    if whose == "of another job":
        stranger.close()
    else:
        context.destroy(linger=0)
    ends.move_to(address)
    ends.until(lambda: ends.numbers() == [1], "what was kept until the Welcome")
    assert line.refused is None


def test_a_server_without_the_key_is_not_believed(
    context: zmq.Context[Any], impostor: Impostor
) -> None:
    fake = impostor.socket
    with closing(Line(context, KEY, impostor.address)) as line:
        peer, hello = fake.recv_multipart()
        welcome = Welcome.make("").encode(OTHER, Hello.decode(hello, KEY))
        fake.send_multipart([peer, welcome])
        fake.send_multipart([peer, b"FdSe" + bytes(28), b"header"])
        received: list[Message] = []

        def dropped() -> bool:
            received.extend(line.receive())
            return line.drops == {"another key": 1, "before the Welcome": 1}

        wait_for(dropped, "both are dropped")
        assert not received
        assert not line.ready
        assert line.refused is not None
        assert "does not have this job's key" in line.refused


def test_a_server_that_was_started_anew_is_greeted_anew(ends: Ends) -> None:
    line = ends.line()
    line.send([push(1)])
    ends.until(lambda: ends.numbers() == [1], "the first")
    ends.restart()
    ticket = 1

    def resent() -> bool:
        nonlocal ticket
        ticket += 1
        line.send([push(ticket)])  # as layers above do; in vain until the new Welcome
        return len(ends.numbers()) > 3

    ends.until(resent, "messages after the restart")
    assert line.sessions == 2
    numbers = ends.numbers()
    assert numbers == sorted(set(numbers))
    assert ends.port.drops["unknown peer"] >= 1
    ends.port.send(ends.heard[-1][0], [Ack(9)])
    ends.until(lambda: Ack(9) in ends.answers[line], "an answer in the new session")


def test_a_server_that_ends_before_its_welcome_is_greeted_again(ends: Ends) -> None:
    line = ends.line()
    line.send([push(1)])
    wait_for(lambda: bool(ends.port.socket.poll(0)), "the Hello has arrived")
    ends.restart()  # and is lost with the server
    ends.until(lambda: ends.numbers() == [1], "what was kept until the Welcome")


def test_the_same_hello_twice_changes_nothing(ends: Ends) -> None:
    """A Line that hears nothing for a while says it again; a slow server then reads both."""
    client = raw(ends.context, ends.port.address)
    hello = Hello.make("", None).encode(KEY)
    answers = set()
    for _ in range(2):
        client.send(hello)
        ends.until(lambda: client.poll(0), "a Welcome")
        answers.add(client.recv())
    assert len(answers) == 1


def test_a_peer_that_has_gone(ends: Ends) -> None:
    line = ends.line(name="short-lived")
    line.send([push(1)])
    ends.until(lambda: ends.heard, "a message")
    peer = ends.heard[0][0]
    ends.lines.remove(line)
    line.close()

    def sent() -> bool:
        ends.port.send(peer, [Ack(1)])
        return ends.port.name_of(peer) is None

    ends.until(sent, "it is forgotten")
    assert ends.port.send(peer, [Ack(1)], track=True) is None
    assert ends.port.send(b"nobody", [Ack(1)]) is None
    ends.assert_works()


def test_those_who_have_left_are_forgotten_when_others_come(ends: Ends) -> None:
    """Else their shared memory would stay for ever."""
    line = ends.line(name="short-lived")
    line.send([push(1)])
    ends.until(lambda: ends.heard, "a message")
    peer = ends.heard[0][0]
    ends.lines.remove(line)
    line.close()

    def others_come() -> bool:
        ends.assert_works()
        return ends.port.name_of(peer) is None

    wait_for(others_come, "it is forgotten")


class Middle:
    """Between a line and the port. Passes on what `alter` makes of the line's messages."""

    def __init__(self, ends: Ends, impostor: Impostor) -> None:
        self.front, self.address = impostor.socket, impostor.address
        self.back = raw(ends.context, ends.port.address)
        self.alter: Callable[[Parts], list[Parts]] = lambda parts: [parts]
        self.peer = b""

    def pump(self) -> None:
        while self.front.poll(0):
            self.peer, *parts = self.front.recv_multipart()
            passed = [parts] if parts[0].startswith(b"FdHi") else self.alter(parts)
            for message in passed:
                self.back.send_multipart(message)
        while self.back.poll(0):
            self.front.send_multipart([self.peer, *self.back.recv_multipart()])


def flipped(parts: Parts, chance: random.Random) -> Parts:
    which = chance.choice([index for index, part in enumerate(parts) if part])
    altered = bytearray(parts[which])
    altered[chance.randrange(len(altered))] ^= 1 << chance.randrange(8)
    return [*parts[:which], bytes(altered), *parts[which + 1 :]]


class Tamperer:
    """Does to messages whatever can be done to them."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.seen: list[Parts] = []
        self.held: list[Parts] = []

    def __call__(self, parts: Parts) -> list[Parts]:
        self.seen.append(parts)
        cut = self.chance.randrange(len(parts))
        other = self.chance.choice(self.seen)
        held, self.held = self.held, []
        return (
            held
            + self.chance.choice(
                [
                    lambda: [parts],
                    lambda: [parts],
                    lambda: [parts, parts],
                    lambda: [other, parts],
                    lambda: [flipped(parts, self.chance), parts],
                    lambda: [flipped(parts, self.chance)],
                    lambda: [parts[: cut + 1], parts],
                    lambda: [parts[cut:]],
                    lambda: [[*parts, b"more"], parts],
                    lambda: [[parts[0], *other[1:]], parts],
                    lambda: [[parts[0][:-1], *parts[1:]], parts],
                    lambda: [],
                    lambda: self._hold(parts),
                ]
            )()
        )

    def _hold(self, parts: Parts) -> list[Parts]:
        """It comes before the next one, or after, which is a change of order."""
        self.held = [parts]
        return []


@pytest.mark.parametrize("seed", range(6))
def test_only_what_was_sent_arrives_once_and_in_order(
    ends: Ends, impostor: Impostor, seed: int
) -> None:
    middle = Middle(ends, impostor)
    line = ends.line(address=middle.address)
    middle.alter = Tamperer(seed)
    values = torch.arange(5000, dtype=torch.float32)
    ticket = 0

    def sent() -> bool:
        nonlocal ticket
        if line.ready:
            ticket += 1
            line.send([push(ticket, values + ticket)])
        middle.pump()
        return ticket >= 150

    ends.until(sent, "all are sent")
    middle.alter = lambda parts: [parts]

    def resent() -> bool:
        nonlocal ticket
        middle.pump()
        ticket += 1
        line.send([push(ticket, values + ticket)])
        return len(ends.heard) > 20 and ends.numbers()[-1] > 150

    ends.until(resent, "once nobody tampers, messages arrive")
    numbers = ends.numbers()
    assert numbers == sorted(set(numbers))
    for _, message in ends.heard:
        assert isinstance(message, Command)
        assert message.values is not None
        assert torch.equal(message.values, values + message.ticket)
    drops = ends.port.drops
    assert drops["replayed"] > 0
    assert drops["not sealed"] > 0
    assert drops["messages are missing"] > 0
    ends.assert_works()


def test_answers_that_are_tampered_with_do_not_arrive(ends: Ends, impostor: Impostor) -> None:
    middle = Middle(ends, impostor)
    line = ends.line(address=middle.address)
    line.send([push(1)])

    def heard() -> bool:
        middle.pump()
        return bool(ends.heard)

    ends.until(heard, "a message")
    peer = ends.heard[0][0]
    for ticket in range(3):
        ends.port.send(peer, [Ack(ticket)])
    answers: list[Parts] = []

    def caught() -> bool:
        while middle.back.poll(0):
            answers.append(middle.back.recv_multipart())
        return len(answers) == 3

    wait_for(caught, "three answers")
    chance = random.Random(0)
    for parts in (flipped(answers[0], chance), answers[0], answers[0], answers[2]):
        middle.front.send_multipart([middle.peer, *parts])
    reasons = {"not sealed": 1, "replayed": 1, "messages are missing": 1}
    ends.until(lambda: line.drops == reasons, "three are dropped")
    assert ends.answers[line] == [Ack(0)]

    def again() -> bool:
        middle.pump()
        return line.sessions == 2

    ends.until(again, "after what is missing, a new session")


def test_malformed_messages_with_a_good_seal_are_dropped(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = ends.line()
    ends.until(lambda: line.ready, "the Welcome")
    with monkeypatch.context() as patch:
        patch.setattr(
            "farandole.server.client.line.pages", lambda messages, arena, *_: [[b"nonsense"]]
        )
        line.send([push(1)])
    line.send([push(2)])
    ends.until(lambda: ends.heard, "the good one")
    assert ends.numbers() == [2]
    assert ends.port.drops == {"malformed": 1}


def test_garbage_over_zmq(ends: Ends) -> None:
    chance = random.Random(1)
    magics = [b"FdHi", b"FdSe", b"FdWe", b"FdNo", b"FdPr", b"FdMs", b""]
    clients = [raw(ends.context, ends.port.address) for _ in range(20)]
    for number in range(4000):
        count = chance.choice([1, 1, 2, 3, 50])
        parts = [chance.randbytes(chance.choice([0, 1, 4, 60, 300])) for _ in range(count)]
        parts[0] = chance.choice(magics) + parts[0]
        clients[number % 20].send_multipart(parts)
    ends.until(lambda: ends.port.drops.total() == 4000, "all are dropped")
    assert not ends.heard
    assert set(ends.port.drops) <= {"unknown peer", "malformed", "unknown version", "another key"}
    told = 0
    while any(client.poll(0) for client in clients):
        for client in clients:
            if client.poll(0):
                client.recv_multipart()
                told += 1
    assert told <= 20, "who sends garbage is answered once"
    ends.assert_works()


def test_garbage_in_a_session_does_not_end_it(ends: Ends) -> None:
    line = ends.line()
    line.send([push(1)])
    ends.until(lambda: ends.heard, "a message")
    for parts in ([b""], [b"FdSe"], [b"FdSe", b""], [b"x" * 100] * 50, [b"FdHi" + bytes(100)]):
        line.socket.send_multipart(parts)
    line.send([push(2)])
    ends.until(lambda: ends.numbers() == [1, 2], "the next message")
    assert line.sessions == 1
    assert ends.port.drops == {"not sealed": 4, "unknown version": 1}


def test_garbage_over_tcp(ends: Ends) -> None:
    chance = random.Random(2)
    host, number = ends.port.address.removeprefix("tcp://").split(":")
    # What zmq says first, and says when it is ready: after that, frames.
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(16 + 1 + 31)
    ready = b"\x05READY\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER"
    spoken = greeting + b"\x04" + bytes([len(ready)]) + ready
    beginnings = [
        b"",
        greeting,
        b"\xff" + bytes(8) + b"\x7f",
        spoken,
        spoken + b"\x02" + struct.pack(">Q", 2**62),  # the length of a frame that never comes
        spoken + b"\x02" + struct.pack(">Q", 2**31),
        spoken + b"\x00\x05abcde",
        b"GET / HTTP/1.1\r\n\r\n",
    ]
    for _ in range(1500):
        with socket.create_connection((host, int(number)), timeout=PATIENCE_SECONDS) as wire:
            wire.sendall(chance.choice(beginnings) + chance.randbytes(chance.randrange(200)))
        ends.pump()
    ends.assert_works()
    assert len(ends.heard) == 1, "only the good client's message"


def test_a_line_survives_garbage_too(ends: Ends) -> None:
    line = ends.line()
    line.send([push(1)])
    ends.until(lambda: ends.heard, "a message")
    peer = ends.heard[0][0]
    chance = random.Random(3)
    for _ in range(300):
        parts = [chance.randbytes(chance.choice([0, 4, 60])) for _ in range(chance.choice([1, 3]))]
        ends.port.socket.send_multipart([peer, *parts])
    ends.port.send(peer, [Ack(1)])
    ends.until(lambda: ends.answers[line], "the answer")
    assert ends.answers[line] == [Ack(1)]
    assert line.drops == {"not sealed": 300}
