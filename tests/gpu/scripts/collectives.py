"""collectives.py [CARRIER]: every collective of tensors on a GPU, against the same on the CPU.

Numbers are whole, so that both must agree to the bit. CARRIER: what must carry the tensors on GPUs.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable

import torch

import farandole as fd
from farandole.comm import Group
from farandole.comm.arithmetic import Op
from farandole.comm.gpu.device_average import DeviceAverage, passes_here

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32)
ODD: tuple[tuple[torch.dtype, Op], ...] = (
    (torch.int16, "sum"),
    (torch.int8, "product"),
    (torch.bool, "max"),
    (torch.complex64, "sum"),
    (torch.complex64, "product"),
)
"""Of some NCCL knows nothing."""
SIZES = (1, 1000, 100_003, 3_000_001, 20_000_000)
DEVICE = torch.device("cuda", torch.cuda.current_device())


def numbers(group: Group, count: int, dtype: torch.dtype, shift: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(group.rank + 100 * shift)
    return torch.randint(-3, 4, (count,), generator=generator).to(dtype)


def same(group: Group, make: Callable[[torch.device], list[torch.Tensor]], what: str) -> None:
    """`make` gives the same on both devices."""
    expected, found = make(torch.device("cpu")), make(DEVICE)
    for one, other in zip(expected, found, strict=True):
        assert other.device.type == "cuda", what
        assert torch.equal(one, other.cpu()), f"{what} on rank {group.rank} of {group.size}"


def reductions(group: Group) -> None:
    for count in SIZES:
        for dtype in DTYPES if count < 10**6 else (torch.float32, torch.bfloat16):
            for op in ("sum", "min", "max") if count < 10**6 else ("sum",):
                same(
                    group,
                    lambda where: [
                        group.all_reduce(numbers(group, count, dtype).to(where), op)  # noqa: B023
                    ],
                    f"all_reduce of {count} {dtype} by {op}",
                )
    for dtype, op in ODD:
        for _ in range(2):
            same(
                group,
                lambda where: [group.all_reduce(numbers(group, 1000, dtype).to(where), op)],  # noqa: B023
                f"all_reduce of {dtype} by {op}",
            )
    for _ in range(3):  # from the second time on by the short way
        halves = torch.full((7,), float(group.rank), device=DEVICE, requires_grad=True)
        tripled = halves * 3
        group.all_reduce(tripled, "average")
        assert torch.allclose(tripled, torch.full_like(tripled, 3 * (group.size - 1) / 2))
        tripled.sum().backward()
        assert halves.grad is not None
        assert bool((halves.grad == 3).all())  # an average has no gradient of its own


def movements(group: Group) -> None:
    after, before = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    for dtype in (torch.float32, torch.int64, torch.int16):
        for count in (5, 70_001):
            data = numbers(group, count + group.rank, dtype)
            same(group, lambda where: group.all_gather(data.to(where)), "all_gather")  # noqa: B023
            even = numbers(group, count * group.size, dtype)
            same(group, lambda where: [group.reduce_scatter(even.to(where))], "reduce_scatter")  # noqa: B023
            same(
                group,
                lambda where: [
                    group.broadcast(numbers(group, count, dtype).to(where), group.size - 1)  # noqa: B023
                ],
                "broadcast",
            )
            parts = [numbers(group, count + to, dtype, to) for to in range(group.size)]
            same(
                group,
                lambda where: group.all_to_all([part.to(where) for part in parts]),  # noqa: B023
                "all_to_all",
            )

            def pass_on(
                where: torch.device, count: int = count, dtype: torch.dtype = dtype
            ) -> list[torch.Tensor]:
                mine, theirs = (
                    numbers(group, count, dtype).to(where),
                    torch.empty(count, dtype=dtype, device=where),
                )
                if group.rank % 2 == 0:
                    group.send(mine, after)
                    group.receive(theirs, before)
                else:
                    group.receive(theirs, before)
                    group.send(mine, after)
                return [theirs]

            if group.size % 2 == 0:
                same(group, pass_on, "send and receive")


def background(group: Group) -> None:
    """Started together, used at once: what uses a result must wait for it on the GPU too."""

    def many(where: torch.device) -> list[torch.Tensor]:
        tensors = [numbers(group, 300_000, torch.float32, shift).to(where) for shift in range(6)]
        for tensor in tensors:
            tensor.mul_(2)  # queued before: the all-reduce must come after it
        handles = [group.start(group.all_reduce, tensor) for tensor in tensors]
        busy = torch.ones(2000, 2000, device=where)
        for _ in range(5):
            busy = busy @ busy * 1e-4
        return [handle.wait() + 1 for handle in handles]

    for _ in range(5):
        same(group, many, "all_reduce in the background")

    def gathered(where: torch.device) -> list[torch.Tensor]:
        handle = group.start(group.all_gather, numbers(group, 1000, torch.float32).to(where))
        return [part + 1 for part in handle.wait()]

    same(group, gathered, "all_gather in the background")


def averages(group: Group) -> None:
    """Of gradients. Another thread sees when they are over, also while a graph is captured."""
    for count in SIZES:
        mine = numbers(group, count, torch.float32).to(DEVICE)
        average = group.average_future(mine, last=True)
        if not isinstance(average, DeviceAverage):  # by another way than NCCL
            average.wait()
            continue
        average.wait()
        is_over = passes_here(DEVICE)
        looks = threading.Event()
        looker = threading.Thread(target=_look, args=(is_over, looks))
        looker.start()
        graph, still = torch.cuda.CUDAGraph(), torch.ones(100, device=DEVICE)
        with torch.cuda.graph(graph):
            looks.wait(60)
            still.add_(1)
        looker.join(60)
        assert is_over()
        expected = torch.zeros(count)
        for rank in range(group.size):
            generator = torch.Generator().manual_seed(rank)
            expected += torch.randint(-3, 4, (count,), generator=generator)
        torch.testing.assert_close(mine.cpu(), expected / group.size)


def _look(is_over: Callable[[], bool], looks: threading.Event) -> None:
    for _ in range(100):
        is_over()
    looks.set()
    while not is_over():
        time.sleep(0.001)


def first_message(group: Group) -> None:
    """Between two of more than two ranks, before these have done anything else together."""
    some = group.subgroup(range(group.size))
    mine = numbers(group, 1000, torch.float32).to(DEVICE)
    if group.rank == 0:
        some.send(mine, 1)
    elif group.rank == 1:
        into = torch.empty_like(mine)
        generator = torch.Generator().manual_seed(0)
        sent = torch.randint(-3, 4, (1000,), generator=generator).float()
        assert torch.equal(some.receive(into, 0).cpu(), sent)
    some.barrier()


def main() -> None:
    run = fd.init(timeout=100)
    group = run.group
    assert run.device.type == "cuda"
    carrier = group.transport.carrier(torch.empty(1, device=DEVICE))
    if len(sys.argv) > 1:
        assert carrier.name == sys.argv[1], carrier.name
    first_message(group)
    half = [rank for rank in range(group.size) if rank % 2 == group.rank % 2]
    averages(group)
    groups = [group]
    if len(half) > 1:
        groups.append(group.subgroup(half))
    for each in groups:
        for checks in (reductions, movements, background):
            checks(each)
            each.barrier()
    run.print(f"{carrier.name}: all collectives agree on {group.size} ranks")


main()
