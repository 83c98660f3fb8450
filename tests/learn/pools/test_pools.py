"""The same bits from threads, processes, an executor, and ranks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.base import clone

from farandole.errors import UserError
from farandole.learn import KMeans, LinearRegression, LogisticRegression
from farandole.learn.pools.base import Pool
from farandole.learn.pools.executor import OnExecutor
from farandole.learn.pools.here import Here
from farandole.learn.pools.processes import Processes
from farandole.learn.pools.ranks import Ranks
from farandole.learn.pools.workers import LostPoolError
from farandole.learn.sources.source import Source
from farandole.learn.sums.sum import Sum
from farandole.testing import run_world
from farandole.train.run import Run
from tests.support.sums import Deadly, MemoryLimitSum, ProcessSum, Raising, Total

random = np.random.default_rng(0)
X = random.normal(size=(1003, 7)) * 10.0 ** random.integers(-3, 4, size=7)
Y = X @ random.normal(size=7) + random.normal(size=1003)
LABELS = (Y > 0).astype(int)


def total(pool: Pool, job: Sum | None = None) -> np.ndarray:
    with pool.place(Source(X, chunk_rows=20)) as placed:
        first = placed.sum(job or Total(), 1.5)
        assert np.array_equal(placed.sum(job or Total(), 1.5), first)
        return first


EXPECTED = total(Here(1))


@pytest.mark.parametrize("threads", [2, 3, 8])
def test_threads(threads: int) -> None:
    assert np.array_equal(total(Here(threads)), EXPECTED)


@pytest.fixture(scope="module")
def processes() -> Any:
    with ProcessPoolExecutor(2, get_context("forkserver")) as executor:
        yield executor


@pytest.mark.parametrize("workers", [1, 3, 100])
def test_an_executor(processes: Any, workers: int) -> None:
    assert np.array_equal(total(OnExecutor(processes, workers)), EXPECTED)


@pytest.mark.parametrize("size", [2, 3])
def test_ranks(size: int, tmp_path: Path) -> None:
    found = run_world(size, lambda run: total(Ranks(run.group)), folder=tmp_path)
    assert all(np.array_equal(each, EXPECTED) for each in found)


def test_more_ranks_than_chunks(tmp_path: Path) -> None:
    def work(run: Run) -> np.ndarray:
        with Ranks(run.group).place(Source(X[:30], chunk_rows=20)) as placed:
            return placed.sum(Total(), 1.0)

    with Here(1).place(Source(X[:30], chunk_rows=20)) as placed:
        expected = placed.sum(Total(), 1.0)
    assert all(np.array_equal(each, expected) for each in run_world(4, work, folder=tmp_path))


def test_an_error_on_one_rank_ends_the_pass_on_all(tmp_path: Path) -> None:
    def work(run: Run) -> str:
        with pytest.raises((ValueError, ZeroDivisionError)) as caught:
            total(Ranks(run.group), Raising())
        return f"{type(caught.value).__name__}: {caught.value}"

    assert run_world(3, work, folder=tmp_path) == [
        "ValueError: rank 2: in chunk 37",
        "ValueError: rank 2: in chunk 37",
        "ZeroDivisionError: in chunk 37",
    ]


def test_ranks_with_different_data_are_refused(tmp_path: Path) -> None:
    def work(run: Run) -> str:
        with pytest.raises(Exception, match="the ranks have different data") as caught:
            LinearRegression(pool=run).fit(X[: 100 + run.rank], Y[: 100 + run.rank])
        return str(caught.value)

    assert "[[100, 7], [101, 7]]" in run_world(2, work, folder=tmp_path)[0]


def test_a_process_that_is_killed_is_named() -> None:
    # Not the module's: its processes are lost.
    with (
        ProcessPoolExecutor(2, get_context("forkserver")) as executor,
        pytest.raises(LostPoolError, match=r"in pass 1 over X, all workers .*chunk_rows=10"),
    ):
        total(OnExecutor(executor, 2), Deadly())


def test_chunks_that_end_every_process_are_named() -> None:
    with pytest.raises(LostPoolError, match=r"in pass 1 over X, 3 workers were lost with chunks "):
        total(Processes(2), Deadly())


def test_processes_are_kept_from_fit_to_fit() -> None:
    def processes_of(pool: Pool) -> list[int]:
        with pool.place(Source(X, chunk_rows=20)) as placed:
            found: list[int] = placed.sum(ProcessSum())
            return found

    with Processes(1) as pool:
        assert clone(LinearRegression(pool=pool)).pool is pool
        first = processes_of(pool)
        assert np.array_equal(total(pool), EXPECTED)
        assert processes_of(pool) == first
        os.kill(first[0], signal.SIGKILL)
        second = processes_of(pool)
        assert second != first
        with pytest.raises(UserError, match="open already"), pool:
            pass
    with pytest.raises(ProcessLookupError):
        os.kill(second[0], 0)


def test_estimators_have_the_same_bits_on_every_pool(processes: Any, tmp_path: Path) -> None:
    def fitted(pool: Any) -> list[np.ndarray]:
        kmeans = KMeans(4, random_state=1, pool=pool, chunk_rows=50).fit(X)
        logistic = LogisticRegression(pool=pool, chunk_rows=50).fit(X, LABELS)
        return [kmeans.cluster_centers_, logistic.coef_, logistic.intercept_]

    expected = fitted(None)
    for found in (fitted(processes), *run_world(2, fitted, folder=tmp_path)):
        assert all(np.array_equal(a, b) for a, b in zip(found, expected, strict=True))


def test_threads_as_an_executor() -> None:
    with ThreadPoolExecutor(2) as executor:
        assert np.array_equal(total(OnExecutor(executor, 2)), EXPECTED)


def test_what_is_no_pool() -> None:
    for pool, kind in (("rays", ValueError), (True, TypeError), (0, ValueError), (-2, ValueError)):
        with pytest.raises(kind, match="pool="):
            LinearRegression(pool=pool).fit(X, Y)


def test_threads_and_processes_need_no_torch(tmp_path: Path) -> None:
    # As people write scripts: nothing is behind `if __name__ == "__main__"`.
    script = tmp_path / "script.py"
    script.write_text("""
import sys
import numpy as np
from farandole.learn import PCA

X = np.random.default_rng(0).normal(size=(40, 3))
found = [PCA(1, pool=pool, chunk_rows=7).fit(X).components_ for pool in (None, 2)]
print(np.array_equal(*found), sorted({"torch", "farandole.comm"} & set(sys.modules)))
""")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=300)
    assert done.stdout == "True []\n", done.stderr


def test_processes_that_map_large_files_are_kept() -> None:
    """loky ends a process that has grown by 300 MB, and mapped files count."""
    with Processes(1).place(Source(X)) as placed:
        assert placed.sum(MemoryLimitSum(), None) > 2**50
