"""All-gather, broadcast, all-to-all, join and barrier."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import farandole.horovod.torch as hvd
from farandole.errors import UserError
from farandole.testing.horovod import run_horovod

SIZES = pytest.mark.parametrize("size", [1, 2, 4])
DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
]


def given(rank: int, *shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    count = torch.Size(shape).numel()
    return ((torch.arange(count) + rank) % 5).reshape(shape).to(dtype)


def same(result: torch.Tensor, expected: torch.Tensor) -> None:
    assert result.dtype == expected.dtype
    assert result.shape == expected.shape
    assert torch.equal(result, expected)


# All-gather


@SIZES
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_allgather(size: int, dtype: torch.dtype) -> None:
    def body() -> None:
        rank = hvd.rank()
        rows = [given(r, r, 3, dtype=dtype) for r in range(size)]  # rank 0 has none
        result = hvd.allgather(rows[rank])
        same(result, torch.cat(rows))
        same(hvd.synchronize(hvd.allgather_async(rows[rank], name="x")), result)
        wide = given(rank, 3, 2, dtype=dtype)
        same(
            hvd.allgather(wide.t()),
            torch.cat([given(r, 3, 2, dtype=dtype).t() for r in range(size)]),
        )
        scalars = torch.stack([given(r, 1, dtype=dtype)[0] for r in range(size)])
        same(hvd.allgather(given(rank, 1, dtype=dtype)[0]), scalars)
        same(hvd.allgather(wide[:, :0]), torch.empty(3 * size, 0, dtype=dtype))
        several = hvd.grouped_allgather([rows[rank], wide[0]])
        again = hvd.synchronize(hvd.grouped_allgather_async([rows[rank], wide[0]], name="x"))
        for one, other in zip(several, again, strict=True):
            same(one, other)
        same(several[0], result)
        same(several[1], torch.cat([given(r, 3, 2, dtype=dtype)[0] for r in range(size)]))

    run_horovod(size, body)


def test_a_group_of_different_dtypes() -> None:
    def body() -> None:
        rank = hvd.rank()
        whole, real = hvd.grouped_allgather([torch.tensor([rank]), torch.ones(rank + 1, 2)])
        assert whole.tolist() == [0, 1]
        assert real.shape == (3, 2)

    run_horovod(2, body)


@SIZES
def test_the_gradient_of_an_allgather_is_the_average_of_its_rows(size: int) -> None:
    def body() -> None:
        rank = hvd.rank()
        x = torch.ones(rank + 1, 2, requires_grad=True)
        y = hvd.allgather(x, name="x")
        (y * torch.arange(len(y)).view(-1, 1) * (rank + 1)).sum().backward()
        before = sum(range(rank + 1))
        mean = sum(r + 1 for r in range(size)) / size
        assert x.grad is not None
        assert x.grad.tolist() == [[mean * (before + i)] * 2 for i in range(rank + 1)]
        scalar = torch.tensor(1.0, requires_grad=True)
        a, b = hvd.grouped_allgather([scalar, x])
        (a.sum() * (rank + 1) + b.sum() * 0).backward()
        assert scalar.grad is not None
        assert scalar.grad.shape == ()
        assert float(scalar.grad) == mean

    run_horovod(size, body)


# Broadcast

BROADCASTS: dict[str, Callable[..., torch.Tensor]] = {
    "sync": hvd.broadcast,
    "in place": hvd.broadcast_,
    "async": lambda *args, **options: hvd.synchronize(hvd.broadcast_async(*args, **options)),
    "async in place": lambda *args, **options: hvd.synchronize(
        hvd.broadcast_async_(*args, **options)
    ),
}


@SIZES
@pytest.mark.parametrize("way", BROADCASTS)
def test_broadcast(size: int, way: str) -> None:
    def body() -> None:
        rank = hvd.rank()
        for root in range(size):
            for dtype in DTYPES:
                mine = given(rank, 3, 2, dtype=dtype)
                result = BROADCASTS[way](mine, root)
                same(result, given(root, 3, 2, dtype=dtype))
                assert (result is mine) == ("in place" in way)
                if "in place" not in way:
                    same(mine, given(rank, 3, 2, dtype=dtype))
            for form in (torch.t, lambda x: x[:, 1], lambda x: x[0, 0], lambda x: x[:0]):
                result = BROADCASTS[way](form(given(rank, 4, 4)), root, name="form")
                same(result, form(given(root, 4, 4)))
            weight = torch.nn.Parameter(given(rank, 3))
            assert torch.equal(BROADCASTS[way](weight, root).detach(), given(root, 3))

    run_horovod(size, body)


@SIZES
def test_the_gradient_of_a_broadcast_goes_to_the_root(size: int) -> None:
    def body() -> None:
        root = size - 1
        x = given(hvd.rank(), 3).requires_grad_()
        (hvd.broadcast(x, root, name="x") * (hvd.rank() + 1)).sum().backward()
        mean = sum(r + 1 for r in range(size)) / size
        assert x.grad is not None
        assert x.grad.tolist() == [mean if hvd.rank() == root else 0.0] * 3

    run_horovod(size, body)


# All-to-all


@SIZES
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_alltoall(size: int, dtype: torch.dtype) -> None:
    def body() -> None:
        rank = hvd.rank()
        every = [given(r, 2 * size, 3, dtype=dtype) for r in range(size)]
        expected = torch.cat([one.chunk(size)[rank] for one in every])
        same(hvd.alltoall(every[rank]), expected)
        received, counts = hvd.synchronize(hvd.alltoall_async(every[rank], name="x"))
        same(received, expected)
        same(counts, torch.full((size,), 2, dtype=torch.int32))
        # Rank r gives to rank t: t rows; its last ones to nobody.
        starts = [sum(range(t)) for t in range(size + 1)]
        given_rows = [given(r, 10, 2, dtype=dtype) for r in range(size)]
        for splits in (list(range(size)), torch.arange(size), torch.arange(size).int()):
            received, counts = hvd.alltoall(given_rows[rank], splits)
            same(received, torch.cat([x[starts[rank] : starts[rank + 1]] for x in given_rows]))
            same(counts, torch.full((size,), rank, dtype=torch.int32))
        same(hvd.alltoall(every[rank].t().contiguous().t()), expected)
        nothing, counts = hvd.alltoall(every[rank], splits=[0] * size)
        assert nothing.shape == (0, 3)
        assert counts.tolist() == [0] * size

    run_horovod(size, body)


@SIZES
def test_the_gradient_of_an_alltoall_comes_back(size: int) -> None:
    def body() -> None:
        rank = hvd.rank()
        x = torch.ones(size * 2, 2, requires_grad=True)
        (hvd.alltoall(x, name="x") * (rank + 1)).sum().backward()
        assert x.grad is not None
        assert x.grad[:, 0].tolist() == [t + 1.0 for t in range(size) for _ in range(2)]
        x = torch.ones(8, 2, requires_grad=True)
        received, counts = hvd.alltoall(x, splits=torch.arange(size))
        assert not counts.requires_grad
        (received * (rank + 1)).sum().backward()
        rows = [t + 1.0 for t in range(size) for _ in range(t)]
        assert x.grad is not None
        assert x.grad[:, 1].tolist() == rows + [0.0] * (8 - len(rows))

    run_horovod(size, body)


# Process sets


def test_process_sets() -> None:
    def body() -> None:
        rank = hvd.rank()
        outer, inner = hvd.add_process_set([0, 3]), hvd.add_process_set([1, 2])
        mine, other = (outer, inner) if rank in (0, 3) else (inner, outer)
        members = mine.ranks
        assert members is not None
        x = torch.full((2,), float(rank))
        same(hvd.allgather(x, process_set=mine), torch.cat([x * 0 + r for r in members]))
        # The root is named by its rank among all.
        assert hvd.broadcast(x, members[1], process_set=mine).tolist() == [members[1]] * 2
        assert hvd.alltoall(x, process_set=mine).tolist() == members
        hvd.barrier(process_set=mine)
        x.requires_grad_()
        hvd.broadcast(x, members[0], process_set=mine).sum().backward()
        assert x.grad is not None
        assert x.grad.tolist() == [1.0 if rank == members[0] else 0.0] * 2
        x.grad = None
        (hvd.allgather(x, process_set=mine)[2 * mine.rank() :]).sum().backward()  # type: ignore[operator]
        assert x.grad.tolist() == [0.5 if rank == members[0] else 1.0] * 2
        with pytest.raises(UserError, match=r"root rank .* is not among the ranks"):
            hvd.broadcast(x, other.ranks[0], process_set=mine)  # type: ignore[index]
        calls: list[Callable[[], Any]] = [
            lambda: hvd.allgather(x, process_set=other),
            lambda: hvd.broadcast(x, other.ranks[0], process_set=other),  # type: ignore[index]
            lambda: hvd.alltoall(x, process_set=other),
            lambda: hvd.barrier(process_set=other),
        ]
        for call in calls:
            with pytest.raises(UserError, match=f"rank {rank} is not in the process set of ranks"):
                call()

    run_horovod(4, body)


# Those that move nothing


@SIZES
def test_nobody_passes_a_barrier_before_all_are_there(size: int) -> None:
    lock = threading.Lock()
    arrived = [0]

    def body() -> None:
        for turn in range(1, 6):
            with lock:
                arrived[0] += 1
            hvd.barrier()
            assert arrived[0] >= turn * size
            hvd.barrier()

    run_horovod(size, body)


@SIZES
def test_join_without_data(size: int) -> None:
    assert set(run_horovod(size, hvd.join)) <= set(range(size))
    assert len(set(run_horovod(size, lambda: hvd.join(device=0)))) == 1


# Wrong arguments


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: hvd.allgather(3), "allgather wants a tensor, not a int"),
        (lambda: hvd.allgather(torch.ones(2).to_sparse()), "torch.sparse_coo tensor"),
        (lambda: hvd.grouped_allgather([]), "at least one tensor"),
        (lambda: hvd.broadcast(torch.ones(2), 2), "root rank 2 is not among the ranks"),
        (lambda: hvd.broadcast(torch.ones(2), -1), "root rank -1 is not among the ranks"),
        (lambda: hvd.broadcast_("x", 0), "broadcast wants a tensor, not a str"),
        (lambda: hvd.broadcast_(torch.ones(2).to_sparse(), 0), "torch.sparse_coo tensor"),
        (lambda: hvd.broadcast_(torch.ones(1).expand(2), 0), "share the same memory"),
        (lambda: hvd.alltoall(torch.ones(3)), "3 rows cannot be split evenly between 2 ranks"),
        (lambda: hvd.alltoall(torch.tensor(1.0)), "a tensor without dimensions has none"),
        (lambda: hvd.alltoall(torch.ones(4), [1]), r"splits=\[1\] for 4 rows and 2 ranks"),
        (lambda: hvd.alltoall(torch.ones(4), [3, 2]), r"splits=\[3, 2\]"),
        (lambda: hvd.alltoall(torch.ones(4), [-1, 2]), r"splits=\[-1, 2\]"),
        (lambda: hvd.alltoall(torch.ones(4), [[1, 2]]), "splits="),
        (lambda: hvd.alltoall(torch.ones(4), 3), "splits="),
        (lambda: hvd.alltoall(torch.ones(4), [0.5, 1.5]), "splits="),
    ],
)
def test_wrong_arguments(call: Callable[[], Any], message: str) -> None:
    def body() -> None:
        with pytest.raises(UserError, match=message):
            call()
        assert hvd.allreduce(torch.ones(2)).tolist() == [1.0, 1.0]

    run_horovod(2, body)
