"""Whatever comes to a server's port from strangers, and whatever nonsense from friends: the server
goes on, and counts it."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import psutil
import pytest
import torch
import zmq

from farandole.server import Cluster, connect
from farandole.server.channels import Line
from farandole.server.node.admission import credentials
from farandole.server.protocol.messages import (
    Command,
    Done,
    Forward,
    Got,
    Kind,
    Message,
    Read,
    Refused,
    Snapshot,
)
from farandole.server.protocol.seal import make_key, read_key
from farandole.server.tables import Table

ROWS = 1000


class Friend:
    """A client that pushes all the while."""

    def __init__(self, cluster: Cluster) -> None:
        self._store = connect(cluster.address, cluster.key_file)
        self._store.create("t", ROWS, dtype="int64")
        self.pushes = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._work)
        self._thread.start()

    def _work(self) -> None:
        while not self._ended.is_set():
            self._store.push("t", torch.ones(ROWS, dtype=torch.int64))
            self.pushes += 1
            time.sleep(0.001)

    def end(self) -> torch.Tensor:
        self._ended.set()
        self._thread.join()
        values = self._store.get("t")
        self._store.close()
        return values


class World:
    """A server process, and a friend of it at work."""

    def __init__(self, cluster: Cluster, friend: Friend) -> None:
        self.cluster, self.friend = cluster, friend
        (self.pid,) = cluster.pids
        sockets = psutil.Process(self.pid).net_connections("tcp")
        (self.port,) = {s.laddr.port for s in sockets if s.status == psutil.CONN_LISTEN}
        self.address = f"tcp://127.0.0.1:{self.port}"
        self.registrar_port = int(cluster.address.rpartition(":")[2])

    def drops(self, reason: str) -> int:
        (facts,) = self.cluster.facts().values()
        return int(facts["drops"].get(reason, 0))

    def goes_on(self) -> None:
        goal = self.friend.pushes + 3
        wait_until(lambda: self.friend.pushes >= goal, "the friend can push")
        assert self.cluster.check() == []
        assert self.cluster.pids == [self.pid]


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with Cluster(servers=1) as cluster:
        friend = Friend(cluster)
        try:
            yield World(cluster, friend)
        finally:
            values = friend.end()
        assert values.unique().tolist() == [friend.pushes]


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    with zmq.Context() as found:
        yield found


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < deadline, f"never: {what}"
        time.sleep(0.02)


@pytest.mark.parametrize("whose", ["server", "registrar"])
def test_raw_bytes(world, whose):
    choose = random.Random(0)
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48)  # as ZMTP begins
    texts = [
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        choose.randbytes(5000),
        greeting,
        greeting + choose.randbytes(300),
        greeting[:11],
        greeting + b"\x02" + (2**63 - 1).to_bytes(8, "big"),  # announces a frame without end
    ]
    port = world.port if whose == "server" else world.registrar_port
    for text in texts:
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(text)
    world.goes_on()


def test_frames_of_any_kind(world, context):
    choose = random.Random(0)
    before = world.drops("unknown peer")
    with context.socket(zmq.DEALER) as stranger:
        stranger.linger = 1000
        key = read_key(world.cluster.key_file)
        stranger.plain_username, stranger.plain_password = credentials(key, world.address)
        stranger.connect(world.address)
        for frames in [
            [b""],
            [b"", b"", b""],
            [choose.randbytes(10)],
            [choose.randbytes(100), choose.randbytes(50_000)],
            [b"FdSe" + choose.randbytes(40), b"FdMs"],
            [bytes(4)] * 200,
        ]:
            stranger.send_multipart(frames)
        wait_until(lambda: world.drops("unknown peer") >= before + 6, "the drops are counted")
    world.goes_on()


def test_one_without_the_key_is_told_so_and_counted(world, context, tmp_path):
    line = Line(context, make_key(tmp_path / "key"), world.address)
    line.send([Command(Kind.PUSH, 0)])
    wait_until(lambda: bool(line.receive() or line.refused), "the answer")
    assert "another job's key" in str(line.refused)
    assert not line.ready
    line.close()
    wait_until(lambda: world.drops("another key") > 0, "the drop is counted")
    world.goes_on()


def test_who_is_refused_at_once_hears_of_it(world, context, tmp_path, monkeypatch):
    """ZeroMQ says it once, and gives up: here before the client's thread has its next turn."""
    connect = zmq.Socket.connect

    def connect_and_sleep(socket: zmq.Socket[bytes], address: str) -> None:
        connect(socket, address)
        if address.startswith("tcp"):
            wait_until(lambda: world.drops("another key") > 0, "the refusal")
            time.sleep(0.2)

    monkeypatch.setattr(zmq.Socket, "connect", connect_and_sleep)
    line = Line(context, make_key(tmp_path / "key"), world.address)
    line.receive()
    line.close()
    assert "another job's key" in str(line.refused)


def test_nonsense_from_one_who_has_the_key_is_refused(world, context):
    table = Table.dense("t", ROWS, ranges=32, dtype="int64")
    (home,) = table.used_ranges
    push = {"table": table.id, "stop": ROWS, "values": torch.ones(ROWS)}  # of another dtype
    asked: Sequence[Message] = [
        Read(-1, 77, ticket=1),
        Read(32, 77, ticket=2),
        Read(home, 77, ticket=3, table=12345),
        Read(home, 77, ticket=4, table=table.id, stop=2**62),
        Read(home, 77, ticket=5, table=table.id, stop=1, text="os.abort"),
        Command(Kind.PUSH, 99, 77, 1, ticket=6),
        Command(Kind.PUSH, home, 77, 1, ticket=7, **push),
        Command(Kind.CREATE, home, 77, 2, ticket=8, text="}{"),
        Command(Kind.CREATE, home, 77, 3, ticket=9, text=table.to_json().replace('"t"', "5")),
        Command(Kind.MEMBERS, home, 77, 4, ticket=10, text="[1, 2]"),
        Command(Kind.PUT, home, 77, 5, ticket=11, table=table.id, text="x", values=torch.ones(0)),
    ]
    for name in ("", "server x", "server ", "server 1"):
        line = Line(context, read_key(world.cluster.key_file), world.address, name=name)
        line.send(asked)
        answers: list[Message] = []
        wait_until(lambda found=answers, of=line: _collect(found, of, len(asked)), "all answers")
        assert all(isinstance(answer, Refused) for answer in answers), answers
        line.close()
    world.goes_on()


def test_what_only_servers_say_is_not_taken_from_clients(world, context):
    line = Line(context, read_key(world.cluster.key_file), world.address)
    said = Command(Kind.MEMBERS, 0, text="[1]")
    line.send(
        [
            Forward(0, 1, 1, said),
            Done(0, 1, 10**9),
            Got(0, 1),
            Snapshot(0, 10**6, "no JSON", (torch.ones(3),)),
            Read(-1, ticket=1),  # so that there is an answer to wait for
        ]
    )
    answers: list[Message] = []
    wait_until(lambda: _collect(answers, line, 1), "the answer to the last")
    line.close()
    world.goes_on()


def _collect(answers: list[Message], line: Line, count: int) -> bool:
    answers += line.receive()
    return len(answers) >= count
