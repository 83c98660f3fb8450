"""Compute modes that leave no room for an MPS daemon, and daemons of others."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from farandole.errors import UserError
from farandole.launch.gpu.mps import MpsDaemon
from farandole.launch.gpu.nvidia_smi import Gpu, GpuProcess
from farandole.launch.gpu.others import check_modes, describe_others

if TYPE_CHECKING:
    from tests.support.gpu_machine import GpuMachine

FREE = Gpu(3, "GPU-3", "H200", "Default", False)
EXCLUSIVE = replace(FREE, compute_mode="Exclusive_Process")
SERVER = GpuProcess(77, "/usr/bin/nvidia-cuda-mps-server", "GPU-3")


def test_modes_that_work() -> None:
    check_modes([FREE, EXCLUSIVE], [])
    check_modes([FREE], [SERVER])
    check_modes([EXCLUSIVE], [replace(SERVER, uuid="GPU-4")])


@pytest.mark.parametrize(
    ("gpu", "message"),
    [
        (replace(FREE, compute_mode="Prohibited"), "nvidia-smi -i 3 -c DEFAULT"),
        (replace(FREE, is_divided=True), "GPU 3 (H200) is in MIG mode"),
        (EXCLUSIVE, "used by /usr/bin/nvidia-cuda-mps-server (process 77)"),
    ],
)
def test_modes_that_do_not(gpu: Gpu, message: str) -> None:
    with pytest.raises(UserError) as raised:
        check_modes([gpu], [SERVER])
    assert message in str(raised.value)


def test_a_daemon_that_was_there_before(here: GpuMachine) -> None:
    theirs = MpsDaemon(["GPU-0"])
    pipes = Path(theirs.variables["CUDA_MPS_PIPE_DIRECTORY"])
    said = describe_others([replace(SERVER, pid=2**22 + 1)], pipes)
    theirs.close()
    assert said is not None
    assert f"one that listens in {pipes}" in said
    assert f"process {2**22 + 1}" in said, "in another container"
    assert " of " in said, "the daemon, and its user"
    assert "listens" not in (describe_others([], pipes) or "")
