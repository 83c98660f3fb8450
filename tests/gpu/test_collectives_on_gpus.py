"""Every collective of tensors on GPUs, by whatever carries them, agrees with the CPU's."""

from __future__ import annotations

import os

import pytest

from tests.gpu.conftest import Job


@pytest.mark.parametrize("workers", [2, 4])
@pytest.mark.usefixtures("shared_nccl")
def test_nccl(job: Job, workers: int) -> None:
    printed = job("collectives.py", "c10d", workers=workers)
    assert f"c10d: all collectives agree on {workers} ranks" in printed


@pytest.mark.parametrize("what", ["barrier", "another size", "on the host"])
@pytest.mark.usefixtures("shared_nccl")
def test_ranks_that_differ(job: Job, what: str) -> None:
    assert "all were told" in job("differ.py", what, workers=2)


@pytest.mark.parametrize("workers", [2, 4])
def test_sums_in_the_memory_of_a_shared_gpu(
    job: Job, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where NCCL is too old."""
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "0")
    printed = job("collectives.py", "gpu", workers=workers)
    assert f"gpu: all collectives agree on {workers} ranks" in printed


def test_through_the_host(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last resort, or by wish."""
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "0")
    assert os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] == "0"
    assert "all collectives agree" in job(
        "collectives.py", "c10d", workers=2, options="--transport c10d"
    )
