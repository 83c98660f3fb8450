"""beside_gpus.py: a job whose device is a GPU, which its ranks share, reduces CPU tensors."""

from __future__ import annotations

import sys
from datetime import timedelta

import torch
from worlds import run_world

from farandole.bench.comm.sides import listening
from farandole.comm import Group
from farandole.worker.join import choose_transport


def body(world: Group) -> None:
    """The GPU itself need not be there: no tensor is put on it."""
    gpu = torch.device("cuda", 0)
    for asked in ("auto", "c10d"):
        transport = choose_transport(world.transport, gpu, asked)
        group = Group(transport)
        assert group.process_group is world.process_group, "DDP of tensors on GPUs needs c10d"
        mine = torch.full((100_003,), group.rank + 1.0)
        with group.register(mine), listening(group) as heard:
            group.all_reduce(mine)
        assert (mine == 3).all()
        if group.rank == 0:
            tried = [nbytes for nbytes, _ in transport.native_wins]
            print(asked, heard.transport, mine.is_shared(), tried, flush=True)


if __name__ == "__main__":
    sys.exit(not run_world("c10d", 2, timedelta(seconds=100), body))
