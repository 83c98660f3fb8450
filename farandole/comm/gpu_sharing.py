"""Whether NCCL carries tensors between ranks that share a GPU.

NCCL does that from version 2.30 on, if a variable says so. It reads its variables when its first
communicator is made, so they can be set until then.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import MutableMapping

import torch
import torch.distributed as dist

ALLOWED = "NCCL_MULTI_RANK_GPU_ENABLE"
BLOCKS = "NCCL_MAX_CTAS"
FIRST_VERSION = (2, 30)
_BLOCKS_OF_MANY = "2"


def nccl_version() -> tuple[int, ...] | None:
    """Of the library that is loaded, not of the one that PyTorch was built with."""
    if not (torch.cuda.is_available() and dist.is_nccl_available()):
        return None
    try:
        # PyTorch tells which version it was built with. Another one may stand in front of that.
        number = ctypes.c_int()
        if ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(number)) == 0:
            return _version(number.value)
    except (OSError, AttributeError):  # it is part of PyTorch's own library, or none of it is here
        pass
    found: tuple[int, ...] = torch.cuda.nccl.version()
    return found


def _version(number: int) -> tuple[int, ...]:
    """22809 is 2.28.9, and 2804, as older ones count, 2.8.4."""
    thousand = 10000 if number >= 10000 else 1000
    return number // thousand, number % thousand // 100, number % 100


def nccl_serves(ranks_per_gpu: int, environ: MutableMapping[str, str] = os.environ) -> bool:
    """Whether NCCL can be used by so many ranks on each GPU. If that takes variables, sets them:
    what the user has set stays."""
    version = nccl_version()
    if version is None:
        return False
    if ranks_per_gpu <= 1:
        return True
    if version[:2] < FIRST_VERSION or environ.setdefault(ALLOWED, "1") != "1":
        return False
    # Ranks wait for each other inside of kernels. If those of one rank leave no room on the GPU for
    # the others', all wait for ever: two ranks that trained did, with as many blocks as NCCL takes.
    environ.setdefault(BLOCKS, _BLOCKS_OF_MANY)
    return True


def nccl_text() -> str:
    """The version, for a message."""
    version = nccl_version()
    return "none" if version is None else ".".join(map(str, version))
