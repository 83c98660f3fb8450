"""Ranks that mpirun or srun started divide the cores, unless someone has decided already."""

from __future__ import annotations

import os

import pytest
import torch

from farandole.system import cores
from farandole.worker import threads
from farandole.worker.environment import RankAssignment


@pytest.mark.parametrize(
    ("ranks", "usable", "environ", "expected"),
    [
        (2, 8, {}, [4]),
        (16, 8, {}, [1]),
        (1, 8, {}, []),
        (2, 8, {"OMP_NUM_THREADS": "3"}, []),
        (2, 4, {}, []),  # bound to half of the cores: it has its share
    ],
)
def test_threads(
    monkeypatch: pytest.MonkeyPatch,
    ranks: int,
    usable: int,
    environ: dict[str, str],
    expected: list[int],
) -> None:
    chosen: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(usable)), raising=False)
    assignment = RankAssignment("openmpi", size=ranks, local_size=ranks)
    threads.share_cores(assignment, environ)
    assert chosen == expected


def test_a_share_is_at_least_one_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2}, raising=False)
    assert [cores.fair_share(workers) for workers in (1, 2, 3, 9)] == [3, 1, 1, 1]
