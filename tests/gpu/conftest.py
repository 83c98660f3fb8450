"""Tests on a real GPU. Without one, or without FARANDOLE_TEST_GPU=1, they are skipped.

Several ranks share one GPU. NCCL serves them from version 2.30 on: put a newer one in front of
PyTorch's with LD_PRELOAD. `benchmarks/gpu_suite.sh` runs all of this, and keeps the log.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from farandole.comm.gpu_sharing import FIRST_VERSION, nccl_text, nccl_version

SCRIPTS = Path(__file__).parent / "scripts"
Job = Callable[..., str]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    if torch.cuda.is_available():
        return
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.skip(reason="needs a GPU, and FARANDOLE_TEST_GPU=1"))


@pytest.fixture
def job(tmp_path: Path) -> Job:
    """Runs a script of ours on so many workers, and returns what they printed."""

    def start(
        script: str, *arguments: str, workers: int, options: str = "", cpu: bool = False
    ) -> str:
        environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
        # All on the first GPU, as on a machine that has no other.
        environ["CUDA_VISIBLE_DEVICES"] = "" if cpu else "0"
        count = ["-n" if cpu else "--per-gpu", str(workers)]
        command = [sys.executable, "-m", "farandole", "run", *count, *options.split()]
        ended = subprocess.run(
            [*command, str(SCRIPTS / script), *arguments],
            cwd=tmp_path,
            env=environ,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return ended.stdout

    return start


@pytest.fixture
def shared_nccl() -> None:
    """NCCL lets ranks share a GPU."""
    if torch.cuda.device_count() == 1 and (nccl_version() or (0,))[:2] < FIRST_VERSION:
        pytest.skip(f"NCCL {nccl_text()} refuses several ranks on one GPU")
