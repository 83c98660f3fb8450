"""Servers as real processes: they are killed, replaced and joined by more while others push, and
none of them outlives its cluster."""

from __future__ import annotations

import os
import signal
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import torch

from farandole.errors import CommError, LaunchError, UserError
from farandole.server import Cluster, connect

SCRIPTS = Path(__file__).parent / "scripts"
PATIENCE_SECONDS = 300.0
ROWS = 1 << 16  # of int64, in small blocks: something in 8 ranges


def wait_until(condition: Callable[[], bool], what: str, cluster: Cluster | None = None) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, (
            f"in {PATIENCE_SECONDS:g} s never: {what}{state(cluster)}"
        )
        if cluster is not None:
            cluster.check()
        time.sleep(0.02)


def state(cluster: Cluster | None) -> str:
    """For the error: what keeps it from what is waited for."""
    if cluster is None:
        return ""
    held = {number: fact.get("bytes") for number, fact in cluster.facts().items()}
    return f"; settled: {cluster.is_settled}, missing: {cluster.missing_copies()}, bytes: {held}"


class Pusher:
    """Adds 1 to every row as fast as it can, a few pushes under way at a time."""

    def __init__(self, cluster: Cluster, shared_memory: bool) -> None:
        self._store = connect(cluster.address, cluster.key_file, shared_memory=shared_memory)
        self._store.create("t", ROWS, dtype="int64", sparse=True)
        self.acknowledged = 0
        self.error: Exception | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work)
        self._thread.start()

    def _work(self) -> None:
        under_way = []
        ones = torch.ones(ROWS, dtype=torch.int64)
        try:
            while not self._stop.is_set() or under_way:
                if not self._stop.is_set():
                    under_way.append(self._store.start_push("t", ones))
                if len(under_way) > 2 or self._stop.is_set():
                    under_way.pop(0).wait()
                    self.acknowledged += 1
                    time.sleep(0.01)  # the servers that start meanwhile need the CPU too
        except Exception as error:
            self.error = error

    def goes_on(self) -> Callable[[], bool]:
        """Becomes true when some more pushes are through."""
        goal = self.acknowledged + 5
        return lambda: self.error is not None or self.acknowledged >= goal

    def end(self) -> None:
        self._stop.set()
        self._thread.join()
        self._store.close()


@contextmanager
def two_pushers(cluster: Cluster) -> Iterator[list[Pusher]]:
    pushers = [Pusher(cluster, shared_memory) for shared_memory in (True, False)]
    try:
        yield pushers
    finally:
        for pusher in pushers:
            pusher.end()


def all_go_on(cluster: Cluster, pushers: list[Pusher]) -> None:
    for goes_on in [pusher.goes_on() for pusher in pushers]:
        wait_until(goes_on, "more pushes", cluster)
    assert [pusher.error for pusher in pushers] == [None] * len(pushers)


def settle(cluster: Cluster, servers: int) -> None:
    def settled() -> bool:
        facts = cluster.facts().values()
        return cluster.is_settled and sum(bool(fact.get("bytes")) for fact in facts) == servers

    wait_until(settled, f"{servers} servers that hold something, and no more moves", cluster)


def test_everything_acknowledged_is_there_once_whoever_dies_and_comes():
    with Cluster(servers=3, replicas=1) as cluster:
        started = set(cluster.pids)
        with two_pushers(cluster) as pushers:
            all_go_on(cluster, pushers)

            victim = cluster.pids[0]
            os.kill(victim, signal.SIGKILL)
            wait_until(lambda: victim not in cluster.pids, "the death is seen", cluster)
            assert len(cluster.pids) == 3
            all_go_on(cluster, pushers)

            cluster.add_server()  # beside the one that takes the place of the dead
            settle(cluster, servers=4)
            all_go_on(cluster, pushers)
            started |= set(cluster.pids)
        total = sum(pusher.acknowledged for pusher in pushers)
        with connect(cluster.address, cluster.key_file) as store:
            store.create("t", ROWS, dtype="int64", sparse=True)
            assert store.get("t").unique().tolist() == [total]
        assert len(started) == 5
        key_file = cluster.key_file
        cluster.close()
        assert not any(psutil.pid_exists(pid) for pid in started)
        assert not key_file.exists()


def test_a_kill_whenever_it_is_settled_loses_nothing():
    """At once, without waiting until the death of the one before is seen."""
    with Cluster(servers=2, replicas=1) as cluster:
        with two_pushers(cluster) as pushers:
            all_go_on(cluster, pushers)
            for _ in range(2):
                wait_until(lambda: cluster.is_settled, "two copies of everything", cluster)
                os.kill(cluster.pids[0], signal.SIGKILL)
                assert not cluster.is_settled
                assert cluster.missing_copies() >= 32  # one server is left
                all_go_on(cluster, pushers)
            wait_until(lambda: cluster.is_settled, "two copies of everything", cluster)
        total = sum(pusher.acknowledged for pusher in pushers)
        with connect(cluster.address, cluster.key_file) as store:
            store.create("t", ROWS, dtype="int64", sparse=True)
            assert store.get("t").unique().tolist() == [total]


def test_without_a_replica_a_death_is_an_error_at_both_ends():
    with Cluster(servers=1) as cluster, connect(cluster.address, cluster.key_file) as store:
        (server,) = cluster.pids
        _check_privacy(cluster, server)
        store.create("t", 10)
        store.push("t", torch.ones(10))
        os.kill(server, signal.SIGKILL)
        with pytest.raises(LaunchError, match=r"32 of 32 ranges .* are lost.*--servers 2"):
            wait_until(lambda: False, "the loss is seen", cluster)
        with pytest.raises(CommError, match=r"32 of 32 ranges .* are lost.*no replica"):
            store.push("t", torch.ones(10))


def _check_privacy(cluster: Cluster, server: int) -> None:
    """Nobody else can read the key, and nobody from elsewhere can connect."""
    assert stat.S_IMODE(cluster.key_file.stat().st_mode) == 0o600
    assert stat.S_IMODE(cluster.key_file.parent.stat().st_mode) == 0o700
    assert cluster.address.startswith("tcp://127.0.0.1:")
    sockets = psutil.Process(server).net_connections("all")
    listening = [s for s in sockets if s.status == psutil.CONN_LISTEN]
    assert {s.laddr.ip for s in listening} == {"127.0.0.1"}
    connected = [s for s in sockets if s.status == psutil.CONN_ESTABLISHED]
    assert {s.raddr.ip for s in connected} == {"127.0.0.1"}


def test_servers_end_when_their_clusters_process_is_killed(sandbox):
    process = sandbox.start([sys.executable, SCRIPTS / "cluster.py"])
    assert process.stdout is not None
    (server,) = map(int, process.stdout.readline().split())
    assert server in [found.pid for found in sandbox.processes()]
    process.kill()
    process.communicate()
    sandbox.wait_until_gone()


def test_functions_that_cannot_be_imported_are_refused_at_once():
    with pytest.raises(UserError, match=r"nowhere_to_be_found.*cannot be imported"):
        Cluster(functions=["nowhere_to_be_found"])


@pytest.mark.parametrize("bind", ["0.0.0.0:0", "192.0.2.7:0", "[::]:0"])
def test_beyond_loopback_there_must_be_a_key_file(bind):
    with pytest.raises(UserError, match="can be reached from other hosts: give a key file"):
        Cluster(bind=bind)


@pytest.mark.parametrize("bind", ["127.0.0.1", ":0", "127.0.0.1:x", ""])
def test_what_is_no_address_is_refused(bind):
    with pytest.raises(UserError, match="not an address to listen at"):
        Cluster(bind=bind)
