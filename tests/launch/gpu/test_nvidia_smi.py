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


def smi_says(machine: GpuMachine, answer: bytes, code: int = 0) -> None:
    (machine.folder / "answer").write_bytes(answer)
    script = f'#!/bin/sh\nwhile read line; do echo "$line"; done < {machine.folder}/answer\n'
    (machine.folder / "nvidia-smi").write_text(f"{script}exit {code}\n")


def test_processes_with_any_name(here: GpuMachine) -> None:
    answer = b"7, GPU-0, python train.py a, b\nNo running processes found\n\n9, GPU-1, \xff\n"
    smi_says(here, answer)
    assert nvidia_smi.list_processes() == [
        nvidia_smi.GpuProcess(7, "python train.py a, b", "GPU-0"),
        nvidia_smi.GpuProcess(9, "\N{REPLACEMENT CHARACTER}", "GPU-1"),
    ]


def test_a_question_that_fails_is_named(here: GpuMachine) -> None:
    smi_says(here, b"NVIDIA-SMI has failed\n", 9)
    with pytest.raises(UserError, match=r"--query-compute-apps=pid.* failed \(exit code 9\)"):
        nvidia_smi.list_processes()


def test_gpus_and_a_warning(here: GpuMachine) -> None:
    gpu = b"0, GPU-0, H200, Default, Disabled\n"
    smi_says(here, gpu + b"WARNING: infoROM is corrupted at gpu 0000:3B:00.0\n")
    assert [gpu.uuid for gpu in nvidia_smi.list_gpus()] == ["GPU-0"]
    smi_says(here, gpu + b"[N/A], GPU-1, H200, Default, Disabled\n")
    with pytest.raises(UserError, match=r"says index=\[N/A\] of the GPU with UUID GPU-1"):
        nvidia_smi.list_gpus()


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
