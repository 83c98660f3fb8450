"""A machine with GPUs, as far as its programs tell: stand-ins for NVIDIA's."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from tests.support.gpu_machine import GpuMachine, make_machine

if TYPE_CHECKING:
    from conftest import Sandbox


@pytest.fixture
def machine(sandbox: Sandbox) -> GpuMachine:
    """With two GPUs, and MPS."""
    return make_machine(sandbox.folder / "nvidia")


@pytest.fixture
def here(machine: GpuMachine, sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> GpuMachine:
    """This process is on that machine."""
    for name, value in (sandbox.environment | machine.variables).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("tempfile.tempdir", str(sandbox.temporary))
    for name in ("CUDA_VISIBLE_DEVICES", "CUDA_MPS_PIPE_DIRECTORY", "CUDA_DEVICE_ORDER"):
        monkeypatch.delenv(name, raising=False)
    for name in [name for name in os.environ if name.startswith("NCCL_")]:
        monkeypatch.delenv(name)
    return machine
