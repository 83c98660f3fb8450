"""Strangers cannot make a server or the registrar hold much, nor keep others waiting."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack

import psutil
import pytest
import zmq

from farandole.server.protocol.sockets import HANDSHAKE_SECONDS
from tests.server.node.test_bad_input import World, context, wait_until, world

__all__ = ["context", "world"]  # fixtures

MIB = 1 << 20
BOUND = 64 * MIB  # what strangers may make a process hold; each of these tests offers more
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00"


def greeting(mechanism: bytes) -> bytes:
    """As ZMTP 3.0 begins."""
    return GREETING + mechanism.ljust(20, b"\x00") + bytes(32)


def ready() -> bytes:
    said = b"\x05READY\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER"
    return b"\x04" + bytes([len(said)]) + said


@pytest.fixture(params=["server", "registrar"])
def target(request: pytest.FixtureRequest, world: World) -> tuple[int, psutil.Process]:
    if request.param == "server":
        return world.port, psutil.Process(world.pid)
    return world.registrar_port, psutil.Process()


@pytest.fixture
def bounded(target: tuple[int, psutil.Process], world: World) -> Iterator[int]:
    """The port to bother. Meanwhile the friend goes on, and the process stays small."""
    port, process = target
    world.goes_on()
    before, most = process.memory_info().rss, 0
    over = threading.Event()

    def watch() -> None:
        nonlocal most
        while not over.is_set():
            most = max(most, process.memory_info().rss)
            time.sleep(0.01)

    watcher = threading.Thread(target=watch)
    watcher.start()
    yield port
    world.goes_on()
    over.set()
    watcher.join()
    assert most - before < BOUND, f"{(most - before) / MIB:.0f} MiB more"


def push_through(port: int, beginning: bytes, total: int) -> int:
    """Sends as much as the other end takes; returns how much that was."""
    sent = 0
    with socket.create_connection(("127.0.0.1", port)) as wire:
        wire.settimeout(HANDSHAKE_SECONDS + 20)
        try:
            wire.sendall(beginning)
            while sent < total:
                sent += wire.send(bytes(MIB))
        except OSError:
            pass  # it was closed
    return sent


def is_closed_while(wire: socket.socket, parts: list[bytes], pause: float = 0) -> bool:
    """Whether the other end closes the connection while these are sent."""
    try:
        for part in parts:
            wire.sendall(part)
            time.sleep(pause)
    except ConnectionError:
        return True
    return False


@pytest.mark.parametrize("mechanism", [b"NULL", b"PLAIN", b"CURVE"])
def test_a_long_frame(bounded, mechanism):
    """Whether as a message or as a command of the handshake."""
    for kind in (b"\x02", b"\x06"):
        header = kind + struct.pack(">Q", 1_500_000_000)
        sent = push_through(bounded, greeting(mechanism) + ready() + header, 256 * MIB)
        assert sent < 64 * MIB  # what the kernel holds for a closed connection
        sent = push_through(bounded, greeting(mechanism) + header, 256 * MIB)
        assert sent < 64 * MIB


def test_a_message_of_many_frames(bounded):
    """It would be held until its last frame comes, which never does."""
    frame = b"\x03" + struct.pack(">Q", 60_000) + bytes(60_000)
    with socket.create_connection(("127.0.0.1", bounded)) as wire:
        wire.settimeout(HANDSHAKE_SECONDS + 20)
        wire.sendall(greeting(b"NULL") + ready())
        assert is_closed_while(wire, [frame] * (256 * MIB // len(frame)))


@pytest.mark.parametrize("target", ["server"], indirect=True)  # else sender and taker are one
def test_a_message_of_many_frames_from_one_who_speaks_zmq(bounded, context):
    with context.socket(zmq.DEALER) as stranger:
        stranger.linger = 0
        stranger.connect(f"tcp://127.0.0.1:{bounded}")
        stranger.setsockopt(zmq.SNDTIMEO, 2000)
        for _ in range(16):
            try:
                stranger.send_multipart([bytes(MIB)] * 16)
            except zmq.Again:
                return


def test_connections_that_say_nothing_are_closed(bounded):
    with ExitStack() as stack:
        silent = []
        for beginning in (b"", b"\xff", GREETING, greeting(b"PLAIN"), greeting(b"CURVE")) * 40:
            wire = stack.enter_context(socket.create_connection(("127.0.0.1", bounded)))
            wire.sendall(beginning)
            silent.append(wire)
        deadline = time.monotonic() + HANDSHAKE_SECONDS + 40
        for wire in silent:
            wire.settimeout(max(0.1, deadline - time.monotonic()))
            try:
                while wire.recv(1000):
                    pass
            except ConnectionError:
                pass


def test_a_slow_sender_is_not_waited_for(bounded):
    """A byte now and then does not keep a connection open."""
    text = greeting(b"PLAIN") + ready()
    with socket.create_connection(("127.0.0.1", bounded)) as wire:
        assert is_closed_while(wire, [bytes([byte]) for byte in text * 4], pause=0.1)


def test_many_who_come_and_go(bounded, world, context):
    for _ in range(300):
        with socket.create_connection(("127.0.0.1", bounded)) as wire:
            wire.sendall(greeting(b"PLAIN") + b"\x04\x20\x05HELLO\x01a\x01b" + bytes(22))
    if bounded == world.port:
        with context.socket(zmq.DEALER) as stranger:
            stranger.linger = 0
            stranger.plain_username, stranger.plain_password = b"farandole 3", b"guess"
            stranger.connect(world.address)
            stranger.send(b"hello")
            wait_until(lambda: world.drops("another key") > 0, "the refusal is counted")
