"""Memory of a GPU that other processes can open: what happens where CUDA refuses."""

from __future__ import annotations

import ctypes

import pytest
import torch

from farandole.comm.transports.shared_gpu.memory import GpuMemory


class Refusing:
    """A CUDA runtime without room. CUDA keeps its last error until somebody asks for it."""

    last_error = 0

    def cudaMalloc(self, *_: object) -> int:  # noqa: N802
        self.last_error = 2
        return 2

    def cudaGetLastError(self) -> int:  # noqa: N802
        found, self.last_error = self.last_error, 0
        return found


def test_an_error_does_not_stay_for_pytorch_to_find(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = Refusing()
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(ctypes, "CDLL", lambda name: runtime)
    with pytest.raises(RuntimeError, match="cudaMalloc failed with CUDA error 2"):
        GpuMemory.make(1 << 20, torch.device("cpu"))
    assert runtime.last_error == 0
