"""Strategies and layouts on GPUs end with what they end with on CPUs, in float64."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from tests.gpu.conftest import Job

STRATEGIES = (
    "allreduce",
    "allreduce:codec=int8",
    "local:every=4",
    "postlocal:at=0.3",
    "adacomm:start=4,steps=6",
    "diloco:every=4",
    "federated",
    "lagged",
    "daso",
)
REMEMBER = (
    "lagged:first=0,last=0.5,steps=2",
    "local:every=3,momentum=0.5,codec=int8",
    "diloco:every=4",
)
LAYOUTS = (
    (2, "stages=2,microbatches=4"),
    (2, "stages=2,microbatches=4,schedule=zero-bubble"),
    (2, "tiles=2x1"),
    (4, "stages=4,microbatches=4"),
    (4, "stages=2,microbatches=4"),
    (4, "tiles=2x2"),
    (4, "stages=2,microbatches=2,tiles=2x1"),
)


@pytest.mark.parametrize("workers", [2, 4])
def test_strategies(job: Job, tmp_path: Path, workers: int) -> None:
    require_alike(job, tmp_path, STRATEGIES, workers, "--pretend-hosts 2")


def test_parameter_servers(job: Job, tmp_path: Path) -> None:
    require_alike(job, tmp_path, ("server:bsp",), 2, "")


def require_alike(
    job: Job, folder: Path, strategies: Sequence[str], workers: int, options: str
) -> None:
    for place in ("cpu", "gpu"):
        kept = str(folder / f"{place}.npz")
        job(
            "strategies.py",
            kept,
            *strategies,
            workers=workers,
            options=options,
            cpu=place == "cpu",
        )
    expected, found = (np.load(folder / f"{place}.npz") for place in ("cpu", "gpu"))
    assert set(expected) == set(found) == set(strategies)
    for name in strategies:
        np.testing.assert_allclose(found[name], expected[name], rtol=0, atol=1e-9, err_msg=name)


@pytest.mark.parametrize("strategy", REMEMBER)
def test_from_a_checkpoint(job: Job, tmp_path: Path, strategy: str) -> None:
    found = []
    for place in ("cpu", "gpu"):
        kept = tmp_path / f"{place}.npy"
        for part in ("half of it", "all of it"):
            assert part in job(
                "resumed.py",
                str(kept),
                strategy,
                workers=2,
                options=f"--name {place}",
                cpu=place == "cpu",
            )
        found.append(np.load(kept))
    np.testing.assert_allclose(found[1], found[0], rtol=0, atol=1e-9)


def test_horovod_s_names(job: Job) -> None:
    assert "Horovod's names agree on 2 ranks" in job("horovod_names.py", workers=2)


@pytest.mark.parametrize("workers", [1, 2])
def test_cuda_graphs(job: Job, workers: int) -> None:
    assert "all graphs agree" in job("graphs.py", workers=workers)


@pytest.mark.parametrize(("workers", "layout"), LAYOUTS)
def test_layouts(job: Job, tmp_path: Path, workers: int, layout: str) -> None:
    job("layouts.py", str(tmp_path / "losses.npz"), layout, workers=workers)
    losses = np.load(tmp_path / "losses.npz")
    np.testing.assert_allclose(losses["found"], losses["plain"], rtol=0, atol=1e-10)
