"""The registrar at its desk: whom it gives up, and whom not."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
import torch

from farandole.errors import CommError, UserError
from farandole.server import Cluster, connect


def wait_until(condition, what):
    deadline = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < deadline, f"never: {what}"
        time.sleep(0.01)


def test_a_pause_of_its_own_is_nobodys_silence(monkeypatch):
    """Ctrl-Z at the launcher, or a host that slept, must not cost all servers and workers."""
    passed = 0.0
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + passed)
    with Cluster(servers=1, in_threads=True, worker_patience=5) as cluster:
        monkeypatch.setattr("farandole.server.registrar.service.time", clock)
        with connect(cluster.address, cluster.key_file, rank=0) as store:
            store.create("t", 3)
            passed = 1000.0
            for _ in range(3):
                store.meet("now", b"")  # the desk has been round once more
                store.push("t", torch.ones(3))
            assert store.members == 1
        assert cluster.check() == []


def test_a_worker_that_is_silent_is_given_up_and_told():
    with (
        Cluster(servers=1, in_threads=True, worker_patience=0.3) as cluster,
        connect(cluster.address, cluster.key_file, rank=0) as silent,
        connect(cluster.address, cluster.key_file) as guest,
    ):
        silent.create("t", 3)
        guest.create("t", 3)
        wait_until(lambda: _members(guest) == 0, "nobody is left")  # it beats every 0.5 s only
        assert any("rank 0 was silent for 0.3 s" in line for line in cluster.check())
        with pytest.raises(CommError, match="given up"):
            silent.push("t", torch.ones(3))
        guest.push("t", torch.ones(3))  # guests are not waited for, and so not given up
        assert guest.get("t").sum() == 3


def _members(store):
    store.get("t")
    return store.members


def test_meetings_do_not_wait_for_the_lost():
    with (
        Cluster(servers=1, in_threads=True) as cluster,
        connect(cluster.address, cluster.key_file, rank=0) as first,
        connect(cluster.address, cluster.key_file, rank=1, timeout=60) as second,
    ):
        cluster.lost(1)
        assert first.meet("end", b"1") == {0: b"1"}
        with pytest.raises(CommError, match="rank 1 was given up"):
            second.meet("end", b"2")


def test_a_port_that_is_taken():
    with Cluster(in_threads=True) as cluster:
        taken = cluster.address.removeprefix("tcp://")
        with pytest.raises(UserError, match=f"cannot listen on tcp://{taken}.*in use.*port 0"):
            Cluster(in_threads=True, bind=taken)
