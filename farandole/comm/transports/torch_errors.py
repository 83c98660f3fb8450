"""What a RuntimeError of PyTorch's process groups means: a rank that is lost, or a fault of this
rank's own.

Gloo raises RuntimeError for everything. NCCL's part of PyTorch has a class of its own for what has
to do with other ranks; anything else is about what this rank has asked for, or about its GPU.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist

from farandole.comm.transports.messages import PeerLost

# Of what NCCL reports: it takes memory when ranks first meet, and checks what it is asked for.
_OWN_FAULTS = ("out of memory", "ncclInvalidUsage", "ncclInvalidArgument")


def raise_lost(
    ranks: Sequence[int], error: RuntimeError, timeout: timedelta, *, nccl: bool
) -> NoReturn:
    """Call it where `error` was caught: raises a `PeerLost` of `ranks`, or `error` itself if this
    rank is at fault. `nccl`: the backend that has raised it is NCCL's."""
    if _is_own(error, nccl=nccl):
        raise error
    # Gloo's own words begin with a source file and end with advice; the middle is the fact.
    said = re.sub(r"^\[[^\]]*\]\s*", "", str(error).strip()).split(". ")[0]
    # Only the text tells a timeout from a closed connection. Nothing depends on this but the words
    # of the error: either way the peer is lost.
    late = "imed out" in said or "imeout" in said
    seconds = timeout.total_seconds()
    lost = PeerLost.late(ranks, seconds) if late else PeerLost(ranks, f"hung up ({said})")
    raise lost from error


def _is_own(error: RuntimeError, *, nccl: bool) -> bool:
    # Another rank would be blamed for a GPU that is out of memory here.
    if isinstance(error, (torch.OutOfMemoryError, torch.AcceleratorError)):
        return True
    if isinstance(error, dist.DistBackendError):
        # The class is the same for whatever NCCL reports, and so its words tell.
        return any(words in str(error) for words in _OWN_FAULTS)
    return nccl and not isinstance(error, dist.DistError)
