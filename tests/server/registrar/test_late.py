"""A worker that was started again hears what was said before, and enters with the next epoch."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch

from farandole.comm import Group
from farandole.comm.transports.base import NEVER
from farandole.errors import CommError
from farandole.server import Cluster, Store
from farandole.server.registrar.transport import RegistrarTransport

PATIENCE = timedelta(seconds=150)


def join(cluster: Cluster, rank: int, *, late: bool = False) -> Group:
    store = Store(cluster.address, cluster.key_file, rank=rank, timeout=150, late=late)
    return Group(RegistrarTransport(store, rank, 2, PATIENCE, late=late))


def count_heads(group: Group) -> float:
    return float(group.all_reduce(torch.ones(1)))


def wait_for_wish(cluster: Cluster) -> None:
    """Until the registrar knows that one who came late is ready for the next epoch."""
    deadline = time.monotonic() + 150
    while not any(each.waits_to_enter for each in cluster._service._participants):
        assert time.monotonic() < deadline, "nobody waits to enter"
        time.sleep(0.01)


def test_it_enters_with_the_next_epoch():
    with Cluster(workers=2, in_threads=True) as cluster, ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda rank: join(cluster, rank), range(2))
        said = list(pool.map(lambda g: g.gather_json(f"rank {g.rank}"), (first, second)))
        assert said == [["rank 0", "rank 1"]] * 2
        for group in (first, second):
            assert group.transport.begin_epoch(0) == 0
        assert list(pool.map(count_heads, (first, second))) == [2.0, 2.0]

        cluster.lost(1)
        assert first.transport.begin_epoch(1) == 1
        assert count_heads(first) == 1.0

        again = join(cluster, 1, late=True)
        # It runs through the beginning of its script: there, it hears what was said then.
        assert again.gather_json("something else") == ["rank 0", "rank 1"]
        entering = pool.submit(again.transport.begin_epoch, 0)
        assert count_heads(first) == 1.0  # it does not count yet
        wait_for_wish(cluster)
        assert not entering.done()
        assert first.transport.begin_epoch(2) == 2
        assert entering.result(150) == 2
        assert list(pool.map(count_heads, (first, again))) == [2.0, 2.0]
        for group in (first, second, again):
            group.close()


def test_when_the_others_are_done_there_is_nothing_to_enter():
    with Cluster(workers=2, in_threads=True) as cluster, ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda rank: join(cluster, rank), range(2))
        cluster.lost(1)
        again = join(cluster, 1, late=True)
        entered: list[int] = []
        waiting = threading.Thread(target=lambda: entered.append(again.transport.begin_epoch(0)))
        waiting.start()
        first.close()
        waiting.join(150)
        assert entered == [NEVER]
        assert count_heads(again) == 1.0  # what follows the loop does not wait for anybody
        second.close()
        again.close()


def test_one_who_comes_when_all_have_left_finds_the_servers_and_is_told_when_they_end():
    with Cluster(workers=2, in_threads=True) as cluster, ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda rank: join(cluster, rank), range(2))
        cluster.lost(1)
        first.close()
        second.close()
        again = join(cluster, 1, late=True)
        assert isinstance(again.transport, RegistrarTransport)
        store = again.transport.store
        store.create("t", 3)  # as its script does before the loop
        assert again.transport.begin_epoch(0) == NEVER
        store.push("t", torch.ones(3))
        cluster.close()
        with pytest.raises(CommError, match="started again too late: the others have finished"):
            store.push("t", torch.ones(3))
        again.close()


def test_one_who_comes_when_the_others_are_done_can_still_read():
    with Cluster(workers=2, in_threads=True) as cluster, ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda rank: join(cluster, rank), range(2))
        store = first.transport.store
        store.create("weights", 4)
        store.put("weights", torch.arange(4.0))
        cluster.lost(1)
        first.close()
        again = join(cluster, 1, late=True)
        assert again.transport.begin_epoch(0) == NEVER
        # "The parameter servers have been closed" would be wrong: they serve until the job ends.
        again.transport.store.find("weights")
        assert again.transport.store.get("weights").flatten().tolist() == [0.0, 1.0, 2.0, 3.0]
        second.close()
        again.close()


def test_a_meeting_that_not_all_come_to_names_those_who_are_missing():
    with Cluster(workers=3, in_threads=True) as cluster, ThreadPoolExecutor(3) as pool:
        where = (cluster.address, cluster.key_file)
        stores = list(pool.map(lambda rank: Store(*where, rank=rank, timeout=4), range(3)))
        with pytest.raises(CommError, match=r"rank 0 waited 4 s for rank\(s\) \[1, 2\]"):
            stores[0].meet("/0", b"")
        for store in stores:
            store.close()
