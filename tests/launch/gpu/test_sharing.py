"""How many workers share the GPUs, and what they are told."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from farandole.errors import UserError
from farandole.launch.gpu import sharing as sharing_module
from farandole.launch.gpu.mps import MpsDaemon
from farandole.launch.gpu.nvidia_smi import GpuProcess
from farandole.launch.gpu.sharing import GpuSharing, launch_sharing, parse_per_gpu, plan_sharing
from farandole.launch.job import Job, Outcome
from tests.support.gpu_machine import gpu

if TYPE_CHECKING:
    from tests.support.gpu_machine import GpuMachine


def launched(sharing: GpuSharing) -> list[Job]:
    """The jobs that would have been launched."""
    jobs: list[Job] = []

    def launch(job: Job) -> Outcome:
        jobs.append(job)
        return Outcome()

    launch_sharing(sharing, Job(sharing.workers, ("train.py",), {"A": "1"}), launch)
    return jobs


def test_what_workers_are_told(here: GpuMachine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    sharing = plan_sharing(3, 40.0)
    assert (sharing.workers, sharing.gpus) == (6, 2)
    (job,) = launched(sharing)
    pipes = Path(job.environment["CUDA_MPS_PIPE_DIRECTORY"])
    assert not pipes.exists(), "the daemon is over with the job"
    assert job.environment == {
        "A": "1",
        "FARANDOLE_PER_GPU": "3",
        "NCCL_MULTI_RANK_GPU_ENABLE": "1",
        "NCCL_MAX_CTAS": "2",
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "40",
        "CUDA_MPS_PIPE_DIRECTORY": str(pipes),
        "CUDA_MPS_LOG_DIRECTORY": str(pipes.with_name("log")),
        "CUDA_VISIBLE_DEVICES": "GPU-1000-aaaa,GPU-0000-aaaa",
    }
    assert job.check is not None


def test_what_the_user_has_set_stays(here: GpuMachine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_MAX_CTAS", "4")
    assert set(plan_sharing(2).variables) == {"FARANDOLE_PER_GPU", "NCCL_MULTI_RANK_GPU_ENABLE"}
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "0")
    assert plan_sharing(4).variables == {"FARANDOLE_PER_GPU": "4"}


def test_one_worker_a_gpu_needs_no_mps(here: GpuMachine) -> None:
    here.lacks("nvidia-cuda-mps-control")
    (job,) = launched(plan_sharing(1))
    assert (job.workers, job.check) == (2, None)
    assert job.environment == {"A": "1", "FARANDOLE_PER_GPU": "1"}
    with pytest.raises(UserError, match="Or use one worker a GPU: --per-gpu 1"):
        plan_sharing(2)


def test_a_daemon_of_the_user(
    here: GpuMachine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs = MpsDaemon(["GPU-0"])
    pipes = theirs.variables["CUDA_MPS_PIPE_DIRECTORY"]
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", pipes)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")  # by the count of that daemon
    sharing = plan_sharing(2)
    assert f"the MPS daemon in {pipes} (CUDA_MPS_PIPE_DIRECTORY) is used" in capsys.readouterr().err
    (job,) = launched(sharing)
    assert job.workers == 2
    assert not [name for name in job.environment if name.startswith("CUDA_")]
    theirs.check()
    theirs.close()
    assert plan_sharing(2).uuids == ("GPU-0000-aaaa",)
    assert "no MPS daemon answers there" in capsys.readouterr().err


def test_a_gpu_that_is_not_free(here: GpuMachine) -> None:
    here.has(gpu(0, compute_mode="Prohibited"))
    with pytest.raises(UserError, match="GPU 0 \\(NVIDIA H200\\) is in compute mode Prohibited"):
        plan_sharing(2)
    with pytest.raises(UserError, match="compute mode Prohibited"):
        plan_sharing(1)
    here.has(gpu(0, **{"mig.mode.current": "Enabled"}))
    with pytest.raises(UserError, match="GPU 0 \\(NVIDIA H200\\) is in MIG mode"):
        plan_sharing(1)
    here.has(gpu(0, compute_mode="Exclusive_Process"))
    assert plan_sharing(1).workers == 1


def test_who_else_is_there_cannot_be_told(
    here: GpuMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That matters only where a GPU takes one process at a time."""

    def fail() -> list[GpuProcess]:
        raise UserError("nvidia-smi --query-compute-apps failed")

    monkeypatch.setattr(sharing_module, "list_processes", fail)
    assert plan_sharing(2).workers == 4
    here.has(gpu(0, compute_mode="Exclusive_Process"))
    with pytest.raises(UserError, match="--query-compute-apps failed"):
        plan_sharing(2)


def test_more_workers_than_mps_takes(here: GpuMachine, capsys: pytest.CaptureFixture[str]) -> None:
    plan_sharing(48)
    assert "--per-gpu" not in capsys.readouterr().err
    plan_sharing(64)
    assert "--per-gpu 64: most drivers let MPS serve 48 processes a GPU" in capsys.readouterr().err


def test_a_very_long_number() -> None:
    with pytest.raises(UserError, match=r"^--per-gpu 1{20}…: give a number") as raised:
        parse_per_gpu("1" * 5000)
    assert len(str(raised.value)) < 200


def test_one_worker_is_not_limited(here: GpuMachine) -> None:
    assert plan_sharing(1, 50.0).variables == {"FARANDOLE_PER_GPU": "1"}


@pytest.mark.parametrize("text", ["0", "-1", "two", "1.5", ""])
def test_what_is_no_number_of_workers(text: str) -> None:
    with pytest.raises(UserError, match=f"--per-gpu {text}: give a number of workers a GPU"):
        parse_per_gpu(text)


def test_as_many_workers_as_n_says(here: GpuMachine) -> None:
    assert plan_sharing(2, workers=4).workers == 4
    with pytest.raises(UserError, match=r"-n 3 and --per-gpu 2: .* 2 GPU\(s\) make 4"):
        plan_sharing(2, workers=3)
