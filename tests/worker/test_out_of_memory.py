"""What a worker that ran out of GPU memory says."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
import torch

from farandole.worker.out_of_memory import explain_out_of_memory, is_out_of_memory

if TYPE_CHECKING:
    from conftest import Sandbox

GIB = 2**30
FAIL = """
import torch, farandole as fd

run = fd.init()
if run.rank == 1:
    try:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    except RuntimeError as error:
        raise ValueError("cannot train") from error
run.group.barrier()
"""


def test_which_errors_are_meant() -> None:
    error = torch.OutOfMemoryError("CUDA out of memory")
    after = RuntimeError("the batch failed")
    after.__context__ = error
    error.__context__ = after  # a circle
    assert is_out_of_memory(error)
    assert is_out_of_memory(after)
    context = torch.AcceleratorError("CUDA error: out of memory")
    assert not is_out_of_memory(context)
    context.error_code = 2  # as PyTorch sets it
    assert is_out_of_memory(context)
    assert not is_out_of_memory(MemoryError())
    assert is_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `c`"))
    assert is_out_of_memory(RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"))
    assert not is_out_of_memory(RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR"))
    assert not is_out_of_memory(ValueError("CUBLAS_STATUS_ALLOC_FAILED"))
    said = "NCCL error … Last error:\nCuda failure 2 'out of memory'"
    assert is_out_of_memory(torch.distributed.DistBackendError(said))
    assert not is_out_of_memory(torch.distributed.DistBackendError("NCCL error … remote process"))
    assert not is_out_of_memory(RuntimeError(said))
    assert not is_out_of_memory(None)


def test_figures_and_ways_out(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(name="NVIDIA H200", total_memory=140 * GIB)
    for name, value in {
        "is_initialized": True,
        "current_device": 0,
        "max_memory_allocated": 30 * GIB,
        "max_memory_reserved": 34 * GIB,
        "mem_get_info": (GIB // 2, 140 * GIB),
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    said = explain_out_of_memory({"FARANDOLE_PER_GPU": "4"})
    assert "NVIDIA H200 has 140.0 GiB, which 4 workers share (--per-gpu 4)" in said
    assert "0.5 GiB of it are free now" in said
    assert "took 30.0 GiB at their peak, and PyTorch held 34.0 GiB" in said
    assert "--per-gpu 2" in said
    assert "stages=2" in said
    cut = explain_out_of_memory({"FARANDOLE_LAYOUT": "stages=2,microbatches=4"})
    assert "share" not in cut
    assert "--layout" not in cut
    assert "more microbatches or more tiles than stages=2,microbatches=4" in cut


@pytest.mark.parametrize(("workers", "fewer"), [(2, 1), (3, 2), (4, 2), (5, 3), (8, 4)])
def test_fewer_workers_are_not_fewer_than_need_be(workers: int, fewer: int) -> None:
    said = explain_out_of_memory({"FARANDOLE_PER_GPU": str(workers)})
    assert f"fewer workers a GPU (--per-gpu {fewer});" in said


def test_a_layout_that_cuts_nothing() -> None:
    assert explain_out_of_memory({"FARANDOLE_LAYOUT": "whole"}) == explain_out_of_memory({})


def test_a_broken_context_gives_no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> int:
        raise RuntimeError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", fail)
    assert explain_out_of_memory({}).startswith("Out of GPU memory. What takes less: a smaller")


def test_the_launcher_shows_it(sandbox: Sandbox) -> None:
    done = sandbox.farandole("run", "-n", "2", sandbox.script("fail.py", FAIL))
    assert done.returncode == 1
    after = done.stderr.split("rank 1 failed (exit code 1); the other was stopped")[1]
    assert "ValueError: cannot train\nfarandole: Out of GPU memory. What takes less" in after
