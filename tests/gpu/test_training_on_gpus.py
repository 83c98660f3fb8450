"""Strategies and layouts on GPUs end with what they end with on CPUs, in float64."""

from __future__ import annotations

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
    for place in ("cpu", "gpu"):
        job(
            "strategies.py",
            str(tmp_path / f"{place}.npz"),
            *STRATEGIES,
            workers=workers,
            options="--pretend-hosts 2",
            cpu=place == "cpu",
        )
    expected, found = (np.load(tmp_path / f"{place}.npz") for place in ("cpu", "gpu"))
    assert set(expected) == set(found) == set(STRATEGIES)
    for name in STRATEGIES:
        np.testing.assert_allclose(found[name], expected[name], rtol=0, atol=1e-9, err_msg=name)


@pytest.mark.parametrize(("workers", "layout"), LAYOUTS)
def test_layouts(job: Job, tmp_path: Path, workers: int, layout: str) -> None:
    job("layouts.py", str(tmp_path / "losses.npz"), layout, workers=workers)
    losses = np.load(tmp_path / "losses.npz")
    np.testing.assert_allclose(losses["found"], losses["plain"], rtol=0, atol=1e-10)
