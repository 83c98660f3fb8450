"""What there is. Nothing of Farandole is built, so these say what can be used."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch.cuda
import torch.distributed as dist
import torch.version


def mpi_built() -> bool:
    """Whether mpi4py is installed."""
    return importlib.util.find_spec("mpi4py") is not None


def gloo_built() -> bool:
    """Whether PyTorch has gloo."""
    return dist.is_available() and dist.is_gloo_available()


def nccl_built() -> int:
    """NCCL's version as Horovod numbers it, such as 22304; 0 where PyTorch has none."""
    if not (dist.is_available() and dist.is_nccl_available()):
        return 0
    major, minor, patch = torch.cuda.nccl.version()[:3]
    return int(major * 10000 + minor * 100 + patch)


def ddl_built() -> bool:
    """IBM's library: never."""
    return False


def ccl_built() -> bool:
    """Intel's library: never."""
    return False


def cuda_built() -> bool:
    """Whether PyTorch is built for CUDA."""
    return torch.version.cuda is not None


def rocm_built() -> bool:
    """Whether PyTorch is built for ROCm."""
    hip: Any = torch.version.hip
    return hip is not None
