"""differ.py: ranks that call different all-reduces on a GPU are named, and none of them hangs.

The calls are known to NCCL: it has begun when the ranks find out. Rank 1 calls what it is told to.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch

import farandole as fd
from farandole.errors import CommError

run = fd.init(timeout=60)
group, what = run.group, sys.argv[1]


def ones(count: int) -> torch.Tensor:
    return torch.ones(count, device=run.device)


def told(call: Callable[[], object]) -> str:
    try:
        call()
    except CommError as error:
        return str(error)
    raise AssertionError("nothing was raised")


for count in (1000, 3_000_000):
    for _ in range(3):
        assert group.all_reduce(ones(count))[0].item() == group.size
mine = ones(3_000_000 if run.rank == 1 and what == "another size" else 1000)
if run.rank == 1 and what == "on the host":
    mine = mine.cpu()
other = what == "barrier" and run.rank == 1
said = told(group.barrier if other else lambda: group.all_reduce(mine))
assert "rank 0 calls all_reduce(float32 (1000,), sum, native, on a GPU), rank 1 calls" in said, said
torch.cuda.synchronize()  # nothing is stuck
assert "no longer travel" in told(lambda: group.all_reduce(ones(1000)))
assert group.all_reduce(torch.ones(3)).tolist() == [group.size] * 3  # on the host
assert (ones(5) * 2).sum().item() == 10  # the GPU itself can still be used
group.barrier()
run.print("all were told")
