"""Says what a worker that ran out of GPU memory had, and what would fit."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

from farandole.environment import LAYOUT, PER_GPU

_GIB = 2**30
_WHOLE = "whole"  # the layout that cuts nothing
_CUDA_OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation
# Of libraries that PyTorch calls. It raises a plain RuntimeError, so the text is all there is.
_STATUSES = ("CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether PyTorch could not allocate memory of a GPU, directly or while the script dealt with
    that."""
    torch = sys.modules.get("torch")  # without it nobody has raised that
    seen: set[int] = set()  # a chain may be closed by hand
    while torch is not None and error is not None and id(error) not in seen:
        if isinstance(error, torch.OutOfMemoryError):
            return True
        # By others than PyTorch's allocator, such as a CUDA context for which there is no room.
        code = getattr(error, "error_code", None)
        if isinstance(error, torch.AcceleratorError) and code == _CUDA_OUT_OF_MEMORY:
            return True
        if _is_of_a_library(torch, error):
            return True
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return False


def _is_of_a_library(torch: Any, error: BaseException) -> bool:
    if not isinstance(error, RuntimeError):
        return False
    said = str(error)
    is_nccl = isinstance(error, getattr(torch.distributed, "DistBackendError", ()))
    return any(status in said for status in _STATUSES) or (is_nccl and "out of memory" in said)


def explain_out_of_memory(environ: Mapping[str, str] = os.environ) -> str:
    """In the worker that ran out: figures, if the GPU still gives them, and the next steps."""
    per_gpu = workers_per_gpu(environ)
    figures = _figures(sys.modules["torch"], per_gpu)
    return f"{figures} {_advice(per_gpu, environ.get(LAYOUT))}"


def _figures(torch: Any, per_gpu: int) -> str:
    try:
        if not torch.cuda.is_initialized():  # and asking must not do it
            return "Out of GPU memory."
        gpu = torch.cuda.get_device_properties(torch.cuda.current_device())
        tensors, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        free, _ = torch.cuda.mem_get_info()
    except RuntimeError:  # the context is broken
        return "Out of GPU memory."
    shared = f", which {per_gpu} workers share (--per-gpu {per_gpu})" if per_gpu > 1 else ""
    return (
        f"Out of GPU memory: {gpu.name} has {_gib(gpu.total_memory)}{shared}, and {_gib(free)} of "
        f"it are free now. The tensors of this rank took {_gib(tensors)} at their peak, and "
        f"PyTorch held {_gib(reserved)} for them."
    )


def _advice(per_gpu: int, layout: str | None) -> str:
    ways = [
        "a smaller batch_size",
        "the same batch in parts, with gradients that accumulate (run.no_sync)",
        "precision=torch.bfloat16 in run.trainer, or torch.autocast",
    ]
    if per_gpu > 1:
        ways.insert(0, f"fewer workers a GPU ({fewer_option(per_gpu)})")
    if layout in (None, "", _WHOLE):
        ways += [
            "the model cut over GPUs (--layout stages=2,microbatches=4, with run.trainer)",
            "for large images their tiles (--layout tiles=2x1)",
        ]
    else:
        ways.append(f"more stages, more microbatches or more tiles than {layout}")
    return f"What takes less: {'; '.join(ways)}."


def fewer_option(per_gpu: int) -> str:
    """What to try next, of `--per-gpu`."""
    return f"--per-gpu {(per_gpu + 1) // 2}"


def workers_per_gpu(environ: Mapping[str, str] = os.environ) -> int:
    said = environ.get(PER_GPU, "")
    return int(said) if said.isdecimal() else 1


def _gib(count: int) -> str:
    return f"{count / _GIB:.1f} GiB"
