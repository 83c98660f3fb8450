"""Workers that share nothing but parameter servers: the same bits, also if some are killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest

from farandole.errors import CommError, FarandoleError, UserError
from farandole.learn import KMeans, LinearRegression
from farandole.learn.pools.here import Here
from farandole.learn.pools.parameter_servers import ParameterServers
from farandole.learn.sources.source import Source
from farandole.learn.sums.sum import Sum
from farandole.server import Cluster, Store
from tests.support.sums import Raising, Total

random = np.random.default_rng(0)
X = random.normal(size=(1003, 7)) * 10.0 ** random.integers(-3, 4, size=7)
SCRIPT = Path(__file__).parent / "scripts" / "parameter_servers_fit.py"


def total(pool: Any, job: Sum | None = None) -> np.ndarray:
    with pool.place(Source(X, chunk_rows=20)) as placed:
        first = placed.sum(job or Total(), 1.5)
        assert np.array_equal(placed.sum(job or Total(), 1.5), first)
        return first


EXPECTED = total(Here(1))


def on_workers(size: int, work: Callable[[Store, int], Any], timeout: float = 60.0) -> list[Any]:
    """What `work` returns, or raises, on each of the workers."""

    def one(rank: int) -> Any:
        with Store(
            cluster.address, cluster.key_file, rank=rank, workers=size, timeout=timeout
        ) as store:
            try:
                return work(store, rank)
            except (ValueError, ArithmeticError, FarandoleError) as error:
                return error

    with (
        Cluster(servers=2, in_threads=True, workers=size) as cluster,
        ThreadPoolExecutor(size) as pool,
    ):
        return list(pool.map(one, range(size)))


@pytest.mark.parametrize("size", [1, 3])
def test_the_same_bits_as_in_one_process(size: int) -> None:
    def work(store: Store, rank: int) -> list[np.ndarray]:
        # Two pools on one store, and one that is used twice.
        pool = ParameterServers(store)
        return [total(pool), total(pool), total(ParameterServers(store))]

    for found in on_workers(size, work):
        assert all(np.array_equal(each, EXPECTED) for each in found)


def test_estimators_with_statistics_of_changing_sizes() -> None:
    rows = random.normal(size=(5000, 3)) + 5 * random.integers(0, 4, size=(5000, 1))
    alone = KMeans(4, random_state=0, chunk_rows=100).fit(rows)

    def work(store: Store, rank: int) -> Any:
        return KMeans(4, random_state=0, chunk_rows=100, pool=store).fit(rows)

    for found in on_workers(2, work):
        assert np.array_equal(found.cluster_centers_, alone.cluster_centers_)
        assert np.array_equal(found.labels_, alone.labels_)
        assert found.report_.bytes_moved > 0


def test_a_failure_of_one_is_one_of_all() -> None:
    found = on_workers(3, lambda store, rank: total(ParameterServers(store), Raising()))
    assert sorted(f"{type(each).__name__}: {each}" for each in found) == [
        "ValueError: worker 2: in chunk 37",
        "ValueError: worker 2: in chunk 37",
        "ZeroDivisionError: in chunk 37",
    ]


def test_other_data_and_other_sums_are_refused() -> None:
    def rows(store: Store, rank: int) -> Any:
        return LinearRegression(pool=store).fit(X[: 1000 + rank], X[: 1000 + rank, 0])

    for error in on_workers(2, rows):
        assert isinstance(error, UserError)
        assert "by rank: {0: [1000, 7], 1: [1001, 7]}" in str(error)

    def state(store: Store, rank: int) -> Any:
        with ParameterServers(store).place(Source(X)) as placed:
            return placed.sum(Total(), float(rank))

    for error in on_workers(2, state):
        assert isinstance(error, UserError)
        assert "another state" in str(error)


def test_a_worker_that_does_not_come_is_named() -> None:
    given_up = Event()

    def work(store: Store, rank: int) -> Any:
        if rank == 1:  # stays connected, and fits nothing: one that left would not be waited for
            return given_up.wait(60)
        try:
            return total(ParameterServers(store))
        finally:
            given_up.set()

    error, outlasted = on_workers(2, work, timeout=1.0)
    assert outlasted
    assert isinstance(error, CommError)
    assert "for rank(s) [1]" in str(error)


def test_without_a_rank_nobody_waits_for_it() -> None:
    with (
        Cluster(in_threads=True) as cluster,
        Store(cluster.address, cluster.key_file) as guest,
        pytest.raises(UserError, match=r"rank="),
    ):
        total(ParameterServers(guest))


def test_workers_that_are_killed_change_nothing(tmp_path: Path) -> None:
    """Worker 1 of three kills itself in its second pass."""
    with Cluster(servers=1, in_threads=True, workers=3) as cluster:
        started = [
            subprocess.Popen(
                [sys.executable, str(SCRIPT), cluster.address, str(cluster.key_file), str(rank)],
                cwd=tmp_path,
                env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
            )
            for rank in range(3)
        ]
        started[1].wait(timeout=120)
        cluster.lost(1)  # or the registrar finds out, after 20 s of silence
        codes = [process.wait(timeout=120) for process in started]
    assert codes == [0, -signal.SIGKILL, 0]
    for rank in (0, 2):
        found = np.load(tmp_path / f"{rank}.npz")
        assert np.array_equal(found["found"], found["expected"])
        assert int(found["losses"]) == 1
