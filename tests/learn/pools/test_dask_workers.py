"""Workers of a Dask cluster, in this process: what they hold can be lost."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from typing import Any

import numpy as np
import pytest

pytest.importorskip("distributed")

from distributed import Client, LocalCluster
from distributed.comm import CommClosedError

from farandole.learn.pools.dask_workers import _DaskWorkers, _Shared
from farandole.learn.pools.dispatched import Dispatched
from farandole.learn.sources.source import Source
from farandole.learn.sums.sum import Sum
from tests.support.sums import Total

X = np.random.default_rng(0).normal(size=(200, 3))


@pytest.fixture
def client() -> Iterator[Client]:
    with (
        LocalCluster(
            n_workers=2, threads_per_worker=1, processes=False, dashboard_address=None
        ) as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        yield client


class Losing(Total):
    """What its tasks need goes in the middle of a pass, once."""

    lose: Callable[[], None]
    left = 1
    lock = threading.Lock()

    def map(self, chunk: Any, state: Any) -> Any:
        with self.lock:
            loses = chunk.number == 7 and Losing.left
            Losing.left -= bool(loses)
        if loses:
            Losing.lose()
        return super().map(chunk, state)


class Remembering(_DaskWorkers):
    def begin(self, job: Sum, state: Any) -> _Shared:
        self.shared = super().begin(job, state)
        return self.shared


@pytest.mark.needs("distributed")
def test_what_all_tasks_need_is_sent_again(client: Client) -> None:
    source = Source(X, chunk_rows=10)
    workers = _DaskWorkers(source, client)
    name, shared = workers.names()[0], workers.begin(Total(), 1.5)
    first = workers.start(name, shared, (0, 4)).result(60)
    held = [*shared.on_workers(), *workers._parts.values()]
    client.cancel(held, force=True)
    assert [each.status for each in held] == ["cancelled"] * 3
    again = workers.start(name, shared, (0, 4)).result(60)
    assert np.array_equal(first["total"], again["total"])
    copies = shared.on_workers()
    assert copies is shared.on_workers()  # as long as they are there
    workers.close()


@pytest.mark.needs("distributed")
def test_lost_in_the_middle_of_a_pass(client: Client) -> None:
    """The tasks are done again, and no worker is blamed."""
    source = Source(X, chunk_rows=10)
    workers = Remembering(source, client)

    def lose() -> None:
        client.cancel(workers.shared.on_workers(), force=True)

    Losing.lose, Losing.left = staticmethod(lose), 1
    placed = Dispatched(source, workers, 2, backups=False)
    assert np.array_equal(placed.sum(Losing(), 1.5), placed.sum(Total(), 1.5))
    assert Losing.left == 0
    assert placed.counts.losses == 0


@pytest.mark.needs("distributed")
def test_who_is_lost(client: Client) -> None:
    workers = _DaskWorkers(Source(X, chunk_rows=10), client)
    here = workers.names()[0]
    assert workers.lost_elsewhere(here, CancelledError())
    assert not workers.lost_elsewhere("inproc://nobody/1/2 thread 0", CancelledError())
    assert not workers.lost_elsewhere(here, CommClosedError())
    with pytest.raises(CommClosedError, match=r"tcp://127\.0\.0\.1:9 is not there any more"):
        workers.start("tcp://127.0.0.1:9 thread 0", workers.begin(Total(), 1.5), (0, 4))
    workers.close()
