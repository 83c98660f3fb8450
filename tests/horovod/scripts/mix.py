"""mix.py: most of what Horovod can do, between real processes; each rank checks its results."""

from __future__ import annotations

import random
import sys
import threading

import torch
from torch import nn

import farandole.horovod.torch as hvd
from farandole.horovod.session import current

SHAPES = [(), (1,), (7,), (3, 5), (0, 4), (70_000,), (300_001,)]
DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int8,
    torch.int64,
    torch.bool,
]


def given(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    count = torch.Size(shape).numel()
    return ((torch.arange(count) + rank) % 3).reshape(shape).to(dtype)


def total(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    every = [given(rank, shape, dtype) for rank in range(hvd.size())]
    return torch.stack(every).any(0) if dtype == torch.bool else sum(every[1:], every[0])


def in_any_order(turns: int) -> None:
    """Each rank asks in an order of its own, and waits in another."""
    order = random.Random(hvd.rank())
    kinds = [(shape, dtype) for shape in SHAPES for dtype in DTYPES]
    for _ in range(turns):
        order.shuffle(kinds)
        asked = []
        for shape, dtype in kinds:
            x = given(hvd.rank(), shape, dtype)
            asked.append((hvd.allreduce_async_(x, name=f"{shape} {dtype}", op=hvd.Sum), x))
        order.shuffle(asked)
        for handle, x in asked:
            assert hvd.synchronize(handle) is x
            assert torch.equal(x, total(tuple(x.shape), x.dtype)), (x.shape, x.dtype)


def from_two_threads() -> None:
    def work(number: int) -> None:
        for turn in range(20):
            x = torch.full((turn * 1000,), float(hvd.rank() + number))
            result = hvd.allreduce(x, name=f"{number}.{turn % 2}", op=hvd.Sum)
            expected = float(sum(range(hvd.size())) + number * hvd.size())
            if not bool((result == expected).all()):
                wrong.append((number, turn))

    wrong: list[tuple[int, int]] = []
    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads if hvd.rank() % 2 else reversed(threads):
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, wrong


def one_by_one() -> None:
    rank, size = hvd.rank(), hvd.size()
    for dtype in DTYPES:
        rows = hvd.allgather(given(rank, (rank * 20_000, 3), dtype))
        assert torch.equal(rows, torch.cat([given(r, (r * 20_000, 3), dtype) for r in range(size)]))
        assert torch.equal(
            hvd.broadcast(given(rank, (100_000,), dtype), size - 1),
            given(size - 1, (100_000,), dtype),
        )
        sent, counts = hvd.alltoall(given(rank, (size * 5, 2), dtype), splits=[rank + 1] * size)
        parts = [given(r, (size * 5, 2), dtype).split(r + 1)[rank] for r in range(size)]
        assert torch.equal(sent, torch.cat(parts))
        assert counts.tolist() == [r + 1 for r in range(size)]
        part = hvd.reducescatter(given(rank, (size * 2 + 1, 2), dtype), op=hvd.Sum)
        assert torch.equal(hvd.allgather(part), total((size * 2 + 1, 2), dtype))
    axis = torch.zeros(4)
    axis[rank] = 1.0
    combined = hvd.allreduce(axis, op=hvd.Adasum)
    assert combined.tolist() == [1.0] * size + [0.0] * (4 - size)
    assert hvd.broadcast_object({"a": (1, "b")} if rank == 0 else None) == {"a": (1, "b")}
    assert hvd.allgather_object(rank) == list(range(size))


def some_ranks_only() -> None:
    rank = hvd.rank()
    for _ in range(2):
        pair = hvd.add_process_set([0, hvd.size() - 1] if hvd.size() > 2 else [1])
        if pair.included():
            x = hvd.allreduce(torch.full((200_000,), float(rank)), process_set=pair, op=hvd.Sum)
            assert float(x[-1]) == float(hvd.size() - 1)
        assert hvd.remove_process_set(pair)


def errors_that_pass() -> None:
    for _ in range(2):
        told = ""
        try:
            hvd.allreduce(torch.ones(2 + hvd.rank()), name="odd")
        except hvd.HorovodInternalError as error:
            told = str(error)
        assert "rank 0 for allreduce(float32 (2,)" in told, told
        assert hvd.allreduce(torch.ones(2), name="odd").tolist() == [1.0, 1.0]


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.left, self.right = nn.Linear(4, 300).double(), nn.Linear(4, 300).double()

    def forward(self, x: torch.Tensor, right_first: bool) -> torch.Tensor:
        if right_first:
            first = self.right(x)
            return self.left(x) * first
        second = self.left(x)
        return self.right(x) * second


def train_in_any_order() -> None:
    """Ranks run the branches in different orders, so gradients come in different orders."""
    size, rank = hvd.size(), hvd.rank()
    model, alone = Branches(), Branches()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model.named_parameters()
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    plain = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
    for step in range(4):
        batch = torch.linspace(-1, 1, size * 8, dtype=torch.float64).reshape(size * 2, 4) + step
        optimizer.zero_grad()
        plain.zero_grad()
        model(batch.chunk(size)[rank], (rank + step) % 2 == 0).square().mean().backward()
        alone(batch, False).square().mean().backward()
        optimizer.step()
        plain.step()
    for p, q in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-10, atol=1e-12)


def uneven() -> None:
    for turn in range(hvd.rank() + 1):
        there = hvd.size() - turn
        assert hvd.allreduce(torch.ones(1000), op=hvd.Sum)[0] == there
        assert float(hvd.allreduce(torch.ones(300_000), op=hvd.Sum, name="large")[-1]) == there
    assert hvd.join() == hvd.size() - 1
    assert hvd.allreduce(torch.ones(1)).tolist() == [1.0]


hvd.init()
assert current().transport == "shm", current().transport
in_any_order(3)
from_two_threads()
one_by_one()
some_ranks_only()
errors_that_pass()
train_in_any_order()
uneven()
if len(sys.argv) > 1:
    hvd.start_timeline(sys.argv[1], mark_cycles=True)
    hvd.allreduce(torch.ones(3), name="seen")
    hvd.barrier()
    hvd.stop_timeline()
print("rank", hvd.rank(), "of", hvd.size())
