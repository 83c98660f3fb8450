"""What carries tensors on GPUs between ranks that have one each: NCCL, through PyTorch.

It is set up when the first such tensor is to travel, so that jobs without GPUs never touch them.
Ranks that share a GPU, which NCCL before 2.30 refuses, copy through the memory of the host instead.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.distributed import PrefixStore, Store

from farandole.comm import C10d, Transport
from farandole.comm.gpu_sharing import nccl_serves
from farandole.comm.transports.c10d import new_process_group


@dataclass(frozen=True)
class GpuLinks:
    """How the ranks of one group can find each other. `store` is theirs alone."""

    store: Store
    ranks_here: int  # on this host
    name: str = "world"

    def of(self, name: str) -> GpuLinks:
        """The same for some of the ranks."""
        return GpuLinks(self.store, self.ranks_here, name)

    def connect(self, via: Transport) -> Transport | None:
        """All ranks of `via` call it. None, on all of them, where NCCL cannot be used."""
        gpus = torch.cuda.device_count()
        able = gpus > 0 and nccl_serves(-(-self.ranks_here // gpus))
        if "" in via.share("yes" if able else ""):
            return None
        store = PrefixStore(f"gpus/{self.name}", self.store)
        group = new_process_group(store, via.rank, via.size, via.timeout, nccl=True)
        return C10d(group, rank=via.rank, size=via.size, timeout=via.timeout, store=store)
