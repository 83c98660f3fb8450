"""horovod_names.py: Horovod's collectives of tensors on a GPU, against the same on the CPU."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

import farandole.horovod.torch as hvd

hvd.init()
RANK, SIZE = hvd.rank(), hvd.size()
HERE = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else "cpu"


def numbers(count: int, dtype: torch.dtype = torch.float64, shift: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(RANK + 100 * shift)
    return torch.randint(-3, 4, (count,), generator=generator).to(dtype)


def same(what: str, compute: Callable[[torch.device | str], list[torch.Tensor]]) -> None:
    expected, found = compute("cpu"), compute(HERE)
    assert all(tensor.device == torch.device(HERE) for tensor in found), what
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(other.cpu(), one, rtol=0, atol=1e-12, msg=f"{what}: {other}")


def collectives() -> None:
    for dtype in (torch.float64, torch.float32, torch.int64):
        mine = numbers(1000, dtype)
        for op in (hvd.Sum, hvd.Min, hvd.Max):
            same("allreduce", lambda at: [hvd.allreduce(mine.to(at), op=op)])  # noqa: B023
        uneven = numbers(10 + RANK, dtype)
        same("allgather", lambda at: [hvd.allgather(uneven.to(at))])  # noqa: B023
        same("broadcast", lambda at: [hvd.broadcast(mine.to(at), SIZE - 1)])  # noqa: B023
        rows = numbers(12 * SIZE, dtype)
        same("alltoall", lambda at: [hvd.alltoall(rows.to(at))])  # noqa: B023
        same("reducescatter", lambda at: [hvd.reducescatter(rows.to(at), op=hvd.Sum)])  # noqa: B023
        several = [numbers(7, dtype, 1), numbers(90, dtype, 2)]
        same(
            "grouped_allreduce",
            lambda at: hvd.grouped_allreduce([one.to(at) for one in several], op=hvd.Sum),  # noqa: B023
        )
    average = numbers(500)
    same("average", lambda at: [hvd.allreduce(average.to(at))])
    same("in place", lambda at: [hvd.allreduce_(average.clone().to(at), op=hvd.Sum)])

    def waited(at: torch.device | str) -> list[torch.Tensor]:
        handles = [
            hvd.allreduce_async(numbers(300, shift=shift).to(at), op=hvd.Sum) for shift in range(5)
        ]
        return [hvd.synchronize(handle) + 1 for handle in handles]

    same("allreduce_async", waited)


def training(at: torch.device | str) -> list[torch.Tensor]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(12, 40), nn.Tanh(), nn.Linear(40, 5)).double().to(at)
    names = list(model.named_parameters())
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=names)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    generator = torch.Generator().manual_seed(RANK)
    for _ in range(8):
        x = torch.randn(6, 12, generator=generator, dtype=torch.float64).to(at)
        y = torch.randint(5, (6,), generator=generator).to(at)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


collectives()
same("training", training)
if RANK == 0:
    print(f"Horovod's names agree on {SIZE} ranks", flush=True)
hvd.shutdown()
