"""agreement_beside.py: claims that are compared while NCCL is at work, on two processes.

Tensors of float32 pretend to lie on GPUs. NCCL is a stand-in that takes notes and sums nothing.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import ClassVar

import torch
from worlds import run_world

from farandole.comm import ByDevice, C10d, Group
from farandole.comm.arithmetic import Op, divide_
from farandole.comm.transports.base import Transport
from farandole.errors import CommError
from farandole.trace.spans import NO_TRACE

LIMIT_SECONDS = 100


class Wire(C10d):
    """As if it had NCCL."""

    def __init__(self, host: Transport) -> None:
        Transport.__init__(self, host.rank, host.size, host.timeout)
        self._nccl = True
        self.begun: list[int] = []
        self.aborts = 0
        self.when_begun: Callable[[], None] = int
        self.divides = False  # as it does after a sum

    @property
    def process_group(self) -> None:  # type: ignore[override]
        return None

    def all_reduce(self, flat: torch.Tensor, op: Op, algorithm: str, claim: str | None) -> None:
        assert claim is None, "it is compared elsewhere"
        self.nccl_all_reduce(flat, op)

    def nccl_all_reduce(self, tensor: torch.Tensor, op: Op) -> None:
        self.begun.append(tensor.numel())
        self.when_begun()
        if self.divides:
            divide_(tensor, op, self.size)

    def abort_nccl(self) -> None:
        self.aborts += 1


class Pretended(ByDevice):
    on_host: ClassVar[set[int]] = set()
    """How many numbers a tensor of float32 has that lies on the host all the same."""

    @staticmethod
    def is_on_device(tensor: torch.Tensor) -> bool:
        return tensor.dtype == torch.float32 and tensor.numel() not in Pretended.on_host


def on_gpu(count: int) -> torch.Tensor:
    return torch.ones(count)


def on_device(group: Group, count: int) -> None:
    group.all_reduce(on_gpu(count), algorithm="native")  # as `auto` chooses on GPUs


def fails(call: Callable[[], object]) -> str:
    try:
        call()
    except CommError as error:
        return str(error)
    raise AssertionError("nothing was raised")


def fresh(world: Group) -> tuple[Group, Wire]:
    wire = Wire(world.transport)
    return Group(Pretended(world.transport, wire, wire)), wire


def new_calls_are_agreed_on_first(world: Group) -> None:
    group, wire = fresh(world)
    said = fails(group.barrier if world.rank else lambda: on_device(group, 5))
    assert (
        "rank 0 calls all_reduce(float32 (5,), sum, native, on a GPU), rank 1 calls barrier()"
        in said
    )
    assert (wire.begun, wire.aborts) == ([], 0)
    on_device(group, 5)  # nothing is broken
    assert wire.begun == [5]


def known_calls_begin_before_the_others_come(world: Group) -> None:
    group, wire = fresh(world)
    on_device(group, 5)
    flag = Path(tempfile.gettempdir()) / f"farandole-begun-{os.getppid()}"
    if world.rank == 0:
        wire.when_begun = flag.touch
        on_device(group, 5)
        flag.unlink()
    else:
        deadline = time.monotonic() + LIMIT_SECONDS
        while not flag.exists():
            assert time.monotonic() < deadline, "rank 0 waits for this rank before it begins"
            time.sleep(0.001)
        on_device(group, 5)
    assert (wire.begun, wire.aborts) == ([5, 5], 0)


def known_calls_are_counted_as_others_are(world: Group) -> None:
    group, wire = fresh(world)
    seen = []
    for _ in range(3):
        before = group.meter.bytes_sent, group.meter.waited_seconds
        on_device(group, 1000)
        assert group.meter.waited_seconds > before[1]
        seen.append(group.meter.bytes_sent - before[0])
    assert seen == [4000] * 3
    with group.meter.waiting():  # what is waited for inside is a part of it
        before_seconds = group.meter.waited_seconds
        on_device(group, 1000)
        assert group.meter.waited_seconds == before_seconds
    assert (wire.begun, wire.aborts) == ([1000] * 4, 0)


def what_is_not_usual_takes_the_long_way(world: Group) -> None:
    """Like a call that is known, but for one thing."""
    group, wire = fresh(world)
    plain = on_gpu(6).view(2, 3)
    group.all_reduce(plain, algorithm="native")
    assert group._known is not None
    short = group._known.reduce
    assert short(plain, "sum", "native")  # this one is usual
    assert short(plain, "sum", "auto")
    apart = torch.ones(2, 6)[:, ::2]
    mirrored = torch._neg_view(torch.ones(2, 3))
    assert mirrored.is_contiguous()
    assert not short(apart, "sum", "auto")
    assert not short(mirrored, "sum", "auto")
    assert not short(plain, "max", "auto")
    assert not short(plain, "sum", "ring")
    assert not short(plain.double(), "sum", "auto")
    assert not short(plain.view(3, 2), "sum", "auto")
    for tensor in (apart, mirrored):
        group.all_reduce(tensor, algorithm="native")
    heard: list[str] = []
    group.trace = Heard(heard)
    assert not short(plain, "sum", "auto")
    group.all_reduce(plain, algorithm="native")
    assert heard == ["all_reduce"]
    assert wire.begun == [6] * 6
    group.trace = NO_TRACE
    # In the background it has its turn already, and the thread that has it is busy.
    assert group.start(lambda: short(plain, "sum", "auto")).wait() is False
    assert short(plain, "sum", "auto")
    assert (wire.begun, wire.aborts) == ([6] * 7, 0)


def averages_have_no_gradient_of_their_own(world: Group) -> None:
    """The short way works on the numbers alone, as the long one does."""
    group, wire = fresh(world)
    wire.divides = True
    leaf = torch.ones(4, requires_grad=True)
    for _ in range(3):
        group.all_reduce(leaf, "average", algorithm="native")
        made = leaf * 3
        before = made.grad_fn
        group.all_reduce(made, "average", algorithm="native")
        assert made.grad_fn is before
    assert leaf.tolist() == [1 / 8] * 4  # the stand-in sums nothing, and halves


def a_schedule_is_agreed_on_first(world: Group) -> None:
    group, wire = fresh(world)
    for _ in range(2):
        group.all_reduce(on_gpu(5), algorithm="ring")
    said = fails(
        group.barrier if world.rank else lambda: group.all_reduce(on_gpu(5), algorithm="ring")
    )
    assert "rank 0 calls all_reduce(float32 (5,), sum, ring, on a GPU)" in said, said
    assert (wire.begun, wire.aborts) == ([5, 5], 0)
    on_device(group, 5)  # nothing is broken


class Heard:
    """A trace of names."""

    def __init__(self, names: list[str]) -> None:
        self._names = names

    def span(
        self, name: str, category: str, **details: str | float
    ) -> AbstractContextManager[None]:
        self._names.append(name)
        return nullcontext()


def one_rank_has_it_on_the_host(world: Group) -> None:
    """It would travel in another way, and neither would hear of the other."""
    calls: dict[str, Callable[[Group], object]] = {
        "all_reduce": lambda group: on_device(group, 11),
        "broadcast": lambda group: group.broadcast(on_gpu(11)),
        "reduce_scatter": lambda group: group.reduce_scatter(on_gpu(11)),
        "all_gather": lambda group: group.all_gather(on_gpu(11)),
        "all_to_all": lambda group: group.all_to_all([on_gpu(11), on_gpu(11)]),
    }
    for name, call in calls.items():
        group, _ = fresh(world)
        Pretended.on_host = {11} if world.rank else set()
        said = fails(lambda: call(group))  # noqa: B023
        Pretended.on_host = set()
        assert f"rank 0 calls {name}(" in said, said
        assert said.count("on a GPU") == 1, said
        assert "on a GPU" in said.split("rank 0 calls")[1].split("rank 1 calls")[0], said


def ranks_that_differ_are_named(world: Group) -> None:
    others: dict[str, Callable[[Group], object]] = {
        "barrier()": Group.barrier,
        "all_reduce(float32 (7,), sum, native, on a GPU)": lambda group: on_device(group, 7),
        "all_reduce(float32 (9,), sum, native, on a GPU)": lambda group: on_device(group, 9),
        "all_reduce(float64 (5,), sum, native)": lambda group: group.all_reduce(
            torch.ones(5, dtype=torch.float64)
        ),
        "all_gather": lambda group: group.all_gather(on_gpu(3)),
    }
    for name, other in others.items():
        group, wire = fresh(world)
        for count in (5, 7):  # these are known from now on, 9 is not
            on_device(group, count)
        counted = group.meter.bytes_sent
        said = fails(
            (lambda: other(group)) if world.rank else lambda: on_device(group, 5)  # noqa: B023
        )
        assert "rank 0 calls all_reduce(float32 (5,), sum, native, on a GPU)" in said, said
        assert f"rank 1 calls {name}" in said, said
        assert wire.aborts == 1, name
        assert group.meter.bytes_sent == counted, "a call that failed has sent nothing"
        assert "no longer travel" in fails(lambda: on_device(group, 5))  # noqa: B023
        assert "no longer travel" in fails(lambda: group.broadcast(on_gpu(5)))  # noqa: B023
        parts = [on_gpu(2), on_gpu(2)]
        assert "no longer travel" in fails(lambda: group.all_to_all(parts))  # noqa: B023
        on_host = torch.ones(3, dtype=torch.float64)
        assert group.all_reduce(on_host).tolist() == [2.0] * 3


def a_lost_rank_is_named(world: Group) -> None:
    group, wire = fresh(world)
    on_device(group, 5)
    if world.rank:
        os._exit(0)
    assert "rank 1 has ended" in fails(lambda: on_device(group, 5))
    assert (wire.begun, wire.aborts) == ([5, 5], 1)


def body(world: Group) -> None:
    new_calls_are_agreed_on_first(world)
    known_calls_begin_before_the_others_come(world)
    known_calls_are_counted_as_others_are(world)
    what_is_not_usual_takes_the_long_way(world)
    averages_have_no_gradient_of_their_own(world)
    a_schedule_is_agreed_on_first(world)
    one_rank_has_it_on_the_host(world)
    ranks_that_differ_are_named(world)
    a_lost_rank_is_named(world)
    print("claims were compared beside", flush=True)


if __name__ == "__main__":
    sys.exit(not run_world("shm", 2, timedelta(seconds=LIMIT_SECONDS), body))
