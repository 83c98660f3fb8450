"""Our store does what PyTorch's does, on every way to it, and raises the same errors."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore

from farandole.worker.loopback import serve_tcp_store
from farandole.worker.store.address import StoreAddress
from farandole.worker.store.client import StoreClient
from farandole.worker.store.server import StoreServer

PATIENCE = timedelta(seconds=150)
SOON = timedelta(seconds=0.1)
TOKEN = b"t" * 32
SERVER = f"""
import sys
from pathlib import Path
from farandole.worker.store.server import StoreServer
server = StoreServer(Path(sys.argv[1]), host="127.0.0.1", token={TOKEN}, torch_clients=True)
print(server.port, flush=True)
sys.stdin.read()
server.close()
"""
Connect = Callable[[], Store]


@pytest.fixture(params=["unix", "host", "prefix", "torch client", "TCPStore", "HashStore"])
def connect(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Connect]:
    """Opens one more client of the same store."""
    if request.param == "HashStore":
        only = dist.HashStore()
        only.set_timeout(PATIENCE)
        yield lambda: only
        return
    if request.param == "TCPStore":
        reference = serve_tcp_store(PATIENCE, "127.0.0.1", 0)
        yield lambda: TCPStore("127.0.0.1", reference.port, is_master=False, timeout=PATIENCE)
        return
    # In a process of its own, as a launcher is: some calls of PyTorch's own client keep the GIL.
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER, tmp_path / "s"],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert server.stdout is not None
    port = int(server.stdout.readline())
    here = StoreAddress(tmp_path / "s")
    kept: list[StoreClient] = []

    def prefixed() -> Store:
        kept.append(StoreClient(here, PATIENCE))
        return PrefixStore("p", kept[-1])

    yield {
        "unix": lambda: StoreClient(here, PATIENCE),
        "host": lambda: StoreClient(StoreAddress(None, "127.0.0.1", port, TOKEN), PATIENCE),
        "prefix": prefixed,
        "torch client": lambda: TCPStore("127.0.0.1", port, is_master=False, timeout=PATIENCE),
    }[request.param]
    for client in kept:
        client.close()
    server.communicate()  # it ends with its standard input
    assert server.returncode == 0
    assert list(tmp_path.iterdir()) == []


def test_every_operation(connect: Connect) -> None:
    store, other = connect(), connect()
    store.set("key", "value")
    assert other.get("key") == b"value"
    store.set("key", "")
    assert other.get("key") == b""
    assert [store.add("n", 5), other.add("n", -7)] == [5, -2]
    assert store.get("n") == b"-2"
    assert store.check(["key", "n"])
    assert not store.check(["key", "none"])
    before = store.num_keys()
    assert other.delete_key("n")
    assert not other.delete_key("n")
    assert store.num_keys() == before - 1
    assert store.compare_set("c", "", "first") == b"first"
    assert other.compare_set("c", "no", "second") == b"first"
    assert other.compare_set("c", "first", "second") == b"second"
    assert store.compare_set("never", "expected", "new") == b"expected"
    assert not store.check(["never"])
    store.append("list", "a")
    store.append("list", "b")
    store.multi_set(["x", "y"], ["1", "2"])
    assert store.multi_get(["x", "y", "list"]) == [b"1", b"2", b"ab"]
    assert other.get("y") == b"2"
    big = "z" * 3_000_000
    store.set("big", big)
    assert other.get("big") == big.encode()


def test_whoever_waits_is_answered_by_whoever_sets(connect: Connect) -> None:
    store, other = connect(), connect()
    with ThreadPoolExecutor(3) as threads:
        waits = threads.submit(store.wait, ["a", "b"], PATIENCE)
        gets = threads.submit(connect().get, "b")
        many = threads.submit(connect().multi_get, ["a", "c"])
        other.set("a", "1")
        other.add("b", 2)
        other.append("c", "3")
        assert waits.result(60) is None
        assert gets.result(60) == b"2"
        assert many.result(60) == [b"1", b"3"]


def test_what_does_not_come_in_time(connect: Connect) -> None:
    store = connect()
    for wait in (lambda: store.wait(["none"], SOON), lambda: store.wait(["none", "nor"], SOON)):
        with pytest.raises(dist.DistStoreError, match=r"(?i)time"):
            wait()
    store.set("a", "1")  # the connection is as good as before
    assert store.get("a") == b"1"
    store.set_timeout(SOON)
    with pytest.raises(dist.DistStoreError, match=r"(?i)time"):
        store.get("none")
    if not isinstance(store, dist.HashStore):
        assert store.timeout == SOON  # type: ignore[attr-defined]


def test_queues(connect: Connect) -> None:
    store, other = connect(), connect()
    if isinstance(store, PrefixStore):
        with pytest.raises(NotImplementedError):  # PyTorch does not pass them on to Python
            store.queue_push("q", "x")
        return
    store.queue_push("q", "x")
    store.queue_push("q", "y")
    assert store.queue_len("q") == 2
    assert [other.queue_pop("q"), other.queue_pop("q", False)] == [b"x", b"y"]
    assert other.queue_len("q") == 0
    with pytest.raises(dist.QueueEmptyError):
        store.queue_pop("q", False)
    with ThreadPoolExecutor(1) as threads:
        popped = threads.submit(other.queue_pop, "q")
        store.queue_push("q", "z")
        assert popped.result(60) == b"z"


def test_a_barrier_and_the_list_of_keys(connect: Connect) -> None:
    store, other = connect(), connect()
    if isinstance(store, PrefixStore | dist.HashStore) or not hasattr(store, "list_keys"):
        return
    store.set("a", "1")
    assert "a" in store.list_keys()
    if hasattr(store, "barrier"):
        with ThreadPoolExecutor(1) as threads:
            comes = threads.submit(other.barrier, "b", 2, PATIENCE)
            store.barrier("b", 2, PATIENCE)
            comes.result(60)


def test_calls_that_wait_do_not_hold_up_others(connect: Connect) -> None:
    store = connect()
    if isinstance(store, TCPStore):
        return  # PyTorch's has one connection, and they do
    with ThreadPoolExecutor(8) as threads:
        waiting = [threads.submit(store.wait, [f"k{n}"], PATIENCE) for n in range(8)]
        for n in range(8):
            store.set(f"k{n}", "1")
        for each in waiting:
            each.result(60)


def test_a_copy_of_a_store(connect: Connect) -> None:
    store = connect()
    copy = store.clone()
    store.set("a", "1")
    assert copy.get("a") == b"1"


def test_a_number_that_is_none_is_refused(tmp_path: Path) -> None:
    """PyTorch's server ends at it."""
    server = StoreServer(tmp_path / "s")
    store = StoreClient(StoreAddress(tmp_path / "s"), PATIENCE)
    store.set("a", "x")
    with pytest.raises(dist.DistStoreError, match="'x', which is not a number"):
        store.add("a", 1)
    store.add("n", 2**62)
    with pytest.raises(dist.DistStoreError, match="more than 64 bits"):
        store.add("n", 2**62)
    assert store.get("a") == b"x"
    server.close()


def test_a_server_that_ends_ends_every_wait(tmp_path: Path) -> None:
    server = StoreServer(tmp_path / "s")
    store = StoreClient(StoreAddress(tmp_path / "s"), PATIENCE)
    store.set("a", "1")
    begun = threading.Event()

    def wait() -> None:
        begun.set()
        PrefixStore("p", store).get("none")

    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(wait)
        begun.wait()
        server.close()
        with pytest.raises(dist.DistNetworkError, match="store at"):
            waiting.result(60)
    with pytest.raises(dist.DistNetworkError):
        store.get("a")
    assert not (tmp_path / "s").exists()


def test_a_long_path(tmp_path: Path) -> None:
    folder = tmp_path / ("long" * 30)
    folder.mkdir()
    server = StoreServer(folder / "s")
    store = StoreClient(StoreAddress(folder / "s"), PATIENCE)
    store.set("a", "1")
    assert store.get("a") == b"1"
    server.close()
    assert list(folder.iterdir()) == []
