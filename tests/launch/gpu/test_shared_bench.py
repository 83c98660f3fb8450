"""`farandole bench train --per-gpu`: a benchmark of workers that share GPUs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner

from farandole.cli import commands
from farandole.errors import UserError
from farandole.launch.job import Job, Outcome

if TYPE_CHECKING:
    from tests.support.gpu_machine import GpuMachine


def test_workers_that_share_a_gpu(here: GpuMachine, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs: list[Job] = []

    def launch(job: Job) -> Outcome:
        jobs.append(job)
        return Outcome()

    monkeypatch.setattr("farandole.launch.launcher.launch", launch)
    arguments = ["bench", "train", "--per-gpu", "3", "--model", "mlp"]
    done = CliRunner().invoke(commands, arguments, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    (job,) = jobs
    assert job.workers == 6
    assert job.environment["FARANDOLE_PER_GPU"] == "3"
    assert "CUDA_MPS_PIPE_DIRECTORY" in job.environment
    error = CliRunner().invoke(commands, [*arguments, "-n", "2"]).exception
    assert isinstance(error, UserError)
    assert "-n 2 and --per-gpu 3" in str(error)
    done = CliRunner().invoke(commands, ["bench", "train", "--per-gpu", "0"])
    assert done.exit_code == 2
    assert "0 is not in the range x>=1" in done.output


def test_an_allocation_with_other_hosts(
    here: GpuMachine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    nodes = tmp_path / "nodes"
    nodes.write_text("localhost\nelsewhere\n")
    monkeypatch.setenv("PBS_JOBID", "7.pbs")
    monkeypatch.setenv("PBS_NODEFILE", str(nodes))
    error = CliRunner().invoke(commands, ["bench", "train", "--per-gpu", "2"]).exception
    assert isinstance(error, UserError)
    assert "in an allocation with other hosts (elsewhere)" in str(error)
