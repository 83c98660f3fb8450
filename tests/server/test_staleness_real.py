"""Workers as real processes, of which one stops, dies or falls silent in the middle.

Three workers; the last sends itself a signal when it has read at clock 3.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from farandole.server import Cluster
from tests.support.standstill import wait_until_asleep

NURSERY = Path(__file__).parent / "scripts" / "nursery.py"
PATIENCE_SECONDS = 300.0
WORKERS, CLOCKS, STOP_AT = 3, 12, 3
OTHERS = range(WORKERS - 1)
LAST = WORKERS - 1


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"in {PATIENCE_SECONDS:g} s never: {what}"
        time.sleep(0.02)


class Job:
    """What can be seen of three workers from outside."""

    def __init__(self, nursery: subprocess.Popen[str], cluster: Cluster, folder: Path, **said: Any):
        self._folder = folder
        self.pids = []
        assert nursery.stdin is not None
        assert nursery.stdout is not None
        about = {
            "address": cluster.address,
            "key_file": str(cluster.key_file),
            "folder": str(folder),
            "workers": WORKERS,
            "clocks": CLOCKS,
            **said,
        }
        for rank in range(WORKERS):
            signal_at = STOP_AT if rank == LAST else -1
            print(json.dumps({**about, "rank": rank, "signal_at": signal_at}), file=nursery.stdin)
            nursery.stdin.flush()
            self.pids.append(int(nursery.stdout.readline()))

    def clocks(self) -> list[int]:
        return [self._read(rank, "clock") or 0 for rank in range(WORKERS)]

    def end(self, rank: int) -> Any:
        wait_until(lambda: self._read(rank, "end") is not None, f"the end of rank {rank}")
        return self._read(rank, "end")

    def _read(self, rank: int, what: str) -> Any:
        path = self._folder / f"{rank}.{what}"
        return json.loads(path.read_text()) if path.exists() else None

    def wait_until_stopped(self, process: psutil.Process) -> None:
        wait_until(lambda: process.status() == psutil.STATUS_STOPPED, "the last has stopped")

    def check_ends(self, ranks: range, staleness: int) -> None:
        """Everyone has made all clocks, and every read kept its bound towards `ranks`."""
        for rank in ranks:
            seen = self.end(rank)
            assert [clock for clock, _ in seen] == list(range(1, CLOCKS + 1))
            for clock, rows in seen:
                assert rows[rank] == clock
                assert all(rows[other] >= clock - staleness for other in ranks)


@pytest.fixture(scope="module")
def nursery() -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, NURSERY], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with process:
        yield process
        process.kill()


@pytest.fixture
def start(nursery, tmp_path) -> Iterator[Callable[..., tuple[Cluster, Job]]]:
    jobs: list[Job] = []
    clusters: list[Cluster] = []

    def begin(staleness: int | None, signal_name: str, **options: Any) -> tuple[Cluster, Job]:
        cluster = Cluster(servers=2, replicas=1, in_threads=True, workers=WORKERS, **options)
        clusters.append(cluster.__enter__())
        job = Job(nursery, cluster, tmp_path, staleness=staleness, signal_name=signal_name)
        jobs.append(job)
        return cluster, job

    yield begin
    for pid in [pid for job in jobs for pid in job.pids if psutil.pid_exists(pid)]:
        os.kill(pid, signal.SIGKILL)
    for cluster in clusters:
        cluster.close()


def both_stand_still(job: Job, clock: int) -> None:
    """They come to this clock and not beyond."""
    wait_until(lambda: job.clocks()[:LAST] == [clock] * LAST, f"both others at clock {clock}")
    for rank in OTHERS:
        wait_until_asleep(job.pids[rank])
    assert job.clocks() == [clock] * LAST + [STOP_AT]


def test_with_a_bound_the_others_wait_for_one_that_stops(start):
    _, job = start(2, "SIGSTOP")
    job.wait_until_stopped(psutil.Process(job.pids[LAST]))
    both_stand_still(job, STOP_AT + 2)
    os.kill(job.pids[LAST], signal.SIGCONT)
    job.check_ends(range(WORKERS), staleness=2)


def test_without_a_bound_they_go_on(start):
    _, job = start(None, "SIGSTOP")
    for rank in OTHERS:
        assert job.end(rank)[-1][0] == CLOCKS
    assert job.clocks()[LAST] == STOP_AT
    os.kill(job.pids[LAST], signal.SIGCONT)
    seen = job.end(LAST)
    assert seen[-1] == [CLOCKS, [CLOCKS] * WORKERS]


def test_one_that_dies_is_waited_for_until_the_cluster_hears_of_it(start):
    cluster, job = start(2, "SIGKILL")
    wait_until(lambda: not psutil.pid_exists(job.pids[LAST]), "the last is dead")
    both_stand_still(job, STOP_AT + 2)
    cluster.lost(LAST)
    job.check_ends(OTHERS, staleness=2)


def test_one_that_is_silent_for_long_is_given_up_and_told_so_when_it_wakes(start):
    _, job = start(0, "SIGSTOP", worker_patience=3.0)
    job.check_ends(OTHERS, staleness=0)
    assert job.clocks()[LAST] == STOP_AT
    os.kill(job.pids[LAST], signal.SIGCONT)
    assert "given up" in job.end(LAST)
