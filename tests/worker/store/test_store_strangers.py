"""Who does not belong to a job gets nothing from its store, and costs it little."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from farandole.errors import FarandoleError, JoinError, UserError
from farandole.worker.store import peer_user, protocol
from farandole.worker.store.address import StoreAddress, launcher_store, new_token, users_token
from farandole.worker.store.client import StoreClient
from farandole.worker.store.handshake import ClientGreeting, ServerGreeting, Tags
from farandole.worker.store.job_store import JobStore
from farandole.worker.store.native import Native
from farandole.worker.store.peer import Peer
from farandole.worker.store.server import StoreServer
from farandole.worker.store.table import Table
from farandole.worker.store.torch_protocol import TorchProtocol

PATIENCE = timedelta(seconds=150)
NOBODY = 65534  # a user id that owns nothing here
MEGABYTE = 1 << 20
HUGE = struct.pack("<I", 1_500_000_000)
TORCH_HELLO = struct.pack("=BI", 0, 0x3C85F7CE)


@pytest.fixture
def token() -> bytes:
    return new_token()


@pytest.fixture
def server(tmp_path: Path, token: bytes) -> Iterator[StoreServer]:
    found = StoreServer(tmp_path / "s", host="127.0.0.1", token=token, torch_clients=True)
    yield found
    found.close()


def as_nobody(work: Callable[[], str]) -> str:
    """What `work` returns in a process of another user."""
    "a host".encode("idna")  # an interpreter of root's may have modules that nobody else can read
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        with contextlib.suppress(BaseException):
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            try:
                said = work()
            except BaseException as error:
                said = type(error).__name__
            os.write(writing, said.encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as answers:
        said = answers.read()
    os.waitpid(child, 0)
    return said


def hung_up(port: int, *messages: bytes) -> str:
    """What the server sends back until it hangs up."""
    with socket.create_connection(("127.0.0.1", port), 20) as line:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            for message in messages:
                line.sendall(message)
            found = b""
            while arrived := line.recv(1 << 16):
                found += arrived
            return found.decode("latin-1")
        return ""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody else")
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says whose a connection is")
def test_another_user_of_this_host_gets_in_nowhere(tmp_path: Path) -> None:
    """As root, whose ids are those of sockets that nobody owns any more."""
    tmp_path.chmod(0o711)
    folder = tmp_path / "job"
    folder.mkdir(mode=0o700)
    job = JobStore(folder)
    job.client().set("secret", "1")
    path = str(folder / "store.socket")

    def by_path() -> str:
        with socket.socket(socket.AF_UNIX) as line:
            line.connect(path)
        return "connected"

    def by_port() -> str:
        ping = TORCH_HELLO + b"\x0d1234"
        return hung_up(job.port, ping) or "nothing"

    assert as_nobody(by_path) == "PermissionError"
    assert as_nobody(by_port) == "nothing"

    # One that has gone before anybody looks at it is not taken for root's.
    def gone_at_once() -> str:
        message = TORCH_HELLO + b"\x01" + b"".join(struct.pack("=Q", 1) + b for b in (b"k", b"v"))
        for _ in range(50):
            with socket.create_connection(("127.0.0.1", job.port), 20) as line:
                line.sendall(message)
        return "done"

    assert as_nobody(gone_at_once) == "done"
    own = dist.TCPStore("127.0.0.1", job.port, is_master=False, timeout=PATIENCE)
    assert own.check(["init/"]) in (True, False)  # this user's is let in, after all the others
    assert job.client().list_keys() == ["secret"]
    job.close()


def test_whose_a_connection_is(server: StoreServer) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as line:
            accepted, _ = listener.accept()
            with accepted:
                assert peer_user.peer_user(accepted) == os.getuid()
                line.close()
                assert peer_user.peer_user(accepted) is None


def test_files_of_a_store_are_its_owners(tmp_path: Path) -> None:
    server = StoreServer(tmp_path / "s")
    assert (tmp_path / "s").stat().st_mode & 0o777 == 0o600
    server.close()


def test_between_hosts_both_must_hold_the_token(server: StoreServer, token: bytes) -> None:
    place = ("127.0.0.1", server.port)
    mine = StoreClient(StoreAddress(None, *place, token), PATIENCE)
    mine.set("a", "1")
    with pytest.raises(dist.DistNetworkError, match="does not hold this job's token"):
        StoreClient(StoreAddress(None, *place, new_token()), PATIENCE)

    # A client that accepts any server, to see what the server makes of its proof.
    class Careless(ClientGreeting):
        def answer(self, challenge: bytes) -> tuple[bytes, Tags]:
            return b"p" * 32, Tags(b"", b"")

    with socket.create_connection(place, 20) as line:
        line.sendall(Careless(b"").hello)
        line.recv(48)
        line.sendall(b"p" * 32)
        assert line.recv(1) == b""
    assert mine.get("a") == b"1"


def test_a_message_that_was_altered_or_repeated_is_not_believed() -> None:
    server, client = ServerGreeting(b"t"), ClientGreeting(b"t")
    proof, outgoing = client.answer(server.challenge(client.hello))
    incoming = server.check(proof)
    sealed = outgoing.seal(b"one")
    assert incoming.open(sealed) == b"one"
    for wrong in (sealed, b"0" + sealed[1:], outgoing.seal(b"three")[:-1], b""):
        with pytest.raises(protocol.ProtocolError):
            incoming.open(wrong)


def test_garbage_costs_little_and_harms_nobody(server: StoreServer, token: bytes) -> None:
    mine = StoreClient(StoreAddress(server.path), PATIENCE)
    mine.set("a", "1")
    own = psutil.Process()
    before = own.memory_info().rss
    block = b"x" * MEGABYTE
    for message in (b"GET / HTTP/1.1\r\n\r\n", b"F" * 100, b"\xff" * 1000, HUGE + block):
        assert hung_up(server.port, message, *[block] * 100) == ""
    # Behind the door: a frame, and a torch query, that claim more than there may be.
    with socket.socket(socket.AF_UNIX) as line:
        line.connect(str(server.path))
        line.sendall(HUGE)
        assert line.recv(1) == b""
    assert hung_up(server.port, TORCH_HELLO + b"\x01" + struct.pack("=Q", 1_500_000_000)) == ""
    assert mine.get("a") == b"1"
    assert own.memory_info().rss - before < 64 * MEGABYTE


def test_a_flood_of_connections_lets_others_through(server: StoreServer, token: bytes) -> None:
    address = StoreAddress(None, "127.0.0.1", server.port, token)
    mine = StoreClient(address, PATIENCE)
    with contextlib.ExitStack() as lines:
        for _ in range(400):
            line = socket.create_connection(("127.0.0.1", server.port), 20)
            lines.enter_context(line)
            line.sendall(b"F")  # slow: the rest never comes
        late = StoreClient(address, PATIENCE)
        late.set("a", "1")
        assert mine.get("a") == b"1"
        assert len(server._peers) < 300
        deadline = time.monotonic() + 150  # each is cut after 5 s
        while server._greetings and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not server._greetings


def test_one_that_does_not_read_is_not_listened_to(server: StoreServer) -> None:
    mine = StoreClient(StoreAddress(server.path), PATIENCE)
    mine.set("big", b"x" * MEGABYTE)
    before = psutil.Process().memory_info().rss
    request = protocol.framed(protocol.pack(protocol.GET, (b"big",)))
    with socket.socket(socket.AF_UNIX) as line:
        line.connect(str(server.path))
        line.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            for _ in range(100_000):
                line.send(request)
        assert mine.get("big") == b"x" * MEGABYTE
        assert psutil.Process().memory_info().rss - before < 64 * MEGABYTE


def test_a_store_is_bounded() -> None:
    table = Table(limit=1000)
    table.set(b"a", b"x" * 500)
    for _ in range(100):
        table.set(b"a", b"y" * 500)
        table.push(b"q", b"z" * 10)
        assert table.pop(b"q") == b"z" * 10
    for fill in (lambda: table.set(b"b", b"x" * 500), lambda: table.push(b"b", b"x" * 500)):
        with pytest.raises(protocol.RefusedError, match="the store is full"):
            fill()
    with pytest.raises(protocol.RefusedError, match="the store is full"):
        table.append(b"a", b"x" * 500)
    assert table.delete(b"a")
    table.set(b"b", b"x" * 500)


class _Nowhere:
    """A socket whose other end takes everything."""

    def send(self, answer: bytes) -> int:
        return len(answer)


@given(st.lists(st.binary(max_size=40), max_size=6), st.integers(0, 20), st.binary(max_size=80))
def test_nothing_but_our_errors_comes_out_of_our_language(
    fields: list[bytes], operation: int, garbage: bytes
) -> None:
    assert protocol.unpack(protocol.pack(operation, fields)) == (operation, fields)
    whole = protocol.framed(protocol.pack(operation, fields))
    for language in (Native(), TorchProtocol()):
        for message in (whole, whole + garbage, garbage, TORCH_HELLO + garbage):
            peer = Peer(_Nowhere(), language, Table(10_000), [])  # type: ignore[arg-type]
            peer.inbox += message
            with contextlib.suppress(FarandoleError):
                peer.read()
            peer.forget_wait()
            assert not peer.table._waiting


def test_what_a_worker_is_told() -> None:
    for address in (StoreAddress(Path("/a:b"), port=7), StoreAddress(None, "h", 7, b"secret")):
        assert launcher_store(address.variables()) == address
        assert "secret" not in repr(address) + str(address)
    assert launcher_store({}) is None
    for text in ("unix:", "unix:/a", "tcp:7:h", "tcp:h:x", "file:7:/a"):
        with pytest.raises(JoinError, match=r"which is no place|and no FARANDOLE_TOKEN"):
            launcher_store({"FARANDOLE_STORE": text})


def test_the_users_token(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("f" * 40 + "\n")
    assert users_token({}) is None
    assert users_token({"FARANDOLE_TOKEN": "e" * 40, "FARANDOLE_TOKEN_FILE": "x"}) == b"e" * 40
    with pytest.raises(UserError, match="chmod 600"):
        users_token({"FARANDOLE_TOKEN_FILE": str(file)})
    file.chmod(0o600)
    assert users_token({"FARANDOLE_TOKEN_FILE": str(file)}) == b"f" * 40
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(UserError, match="is not a file of yours"):
        users_token({"FARANDOLE_TOKEN_FILE": str(tmp_path / "pipe")})
    with pytest.raises(UserError, match="cannot read"):
        users_token({"FARANDOLE_TOKEN_FILE": str(tmp_path / "none")})
    with pytest.raises(UserError, match="5 characters"):
        users_token({"FARANDOLE_TOKEN": "guess"})
