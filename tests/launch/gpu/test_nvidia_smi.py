"""What `nvidia-smi` says, and where it says nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from farandole.errors import UserError
from farandole.launch.gpu import nvidia_smi

if TYPE_CHECKING:
    from tests.support.gpu_machine import GpuMachine


def test_gpus_and_their_users(here: GpuMachine) -> None:
    one = {"index": 0, "uuid": "GPU-0", "name": "A, B", "compute_mode": "Exclusive_Process"}
    one |= {"mig.mode.current": "Enabled", "memory.used": 5}
    one["name"] = '"A, B"'
    user = {"pid": 12, "gpu_uuid": "GPU-0", "process_name": "/usr/bin/python3"}
    here.has(one, processes=(user, {**user, "pid": "[N/A]"}))
    assert nvidia_smi.list_gpus() == [
        nvidia_smi.Gpu(0, "GPU-0", "A, B", "Exclusive_Process", is_divided=True)
    ]
    assert nvidia_smi.list_processes() == [nvidia_smi.GpuProcess(12, "/usr/bin/python3", "GPU-0")]
    assert nvidia_smi.gpu_use() == [nvidia_smi.GpuUse("GPU-0", None, 5.0, None)]


def test_no_driver(here: GpuMachine) -> None:
    here.has()
    with pytest.raises(UserError, match=r"exit code 6\): No devices were found"):
        nvidia_smi.list_gpus()
    (here.folder / "nvidia-smi").write_text("#!/bin/sh\necho hello\n")
    with pytest.raises(UserError, match="says what is not understood: 'hello"):
        nvidia_smi.list_gpus()
    here.lacks("nvidia-smi")
    with pytest.raises(UserError, match="there is no nvidia-smi on the PATH"):
        nvidia_smi.list_gpus()
