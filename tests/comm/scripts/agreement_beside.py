"""agreement_beside.py: claims that are compared while NCCL is at work, on two processes.

Tensors of float32 pretend to lie on GPUs. NCCL is a stand-in that takes notes and sums nothing.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
from worlds import run_world

from farandole.comm import ByDevice, C10d, Group
from farandole.comm.arithmetic import Op
from farandole.comm.transports.base import Transport
from farandole.errors import CommError

LIMIT_SECONDS = 100


class Wire(C10d):
    """As if it had NCCL."""

    def __init__(self, host: Transport) -> None:
        Transport.__init__(self, host.rank, host.size, host.timeout)
        self._nccl = True
        self.begun: list[int] = []
        self.aborts = 0
        self.when_begun: Callable[[], None] = int

    @property
    def process_group(self) -> None:  # type: ignore[override]
        return None

    def all_reduce(self, flat: torch.Tensor, op: Op, algorithm: str, claim: str | None) -> None:
        assert claim is None, "it is compared elsewhere"
        self.begun.append(flat.numel())
        self.when_begun()

    def abort_nccl(self) -> None:
        self.aborts += 1


class Pretended(ByDevice):
    @staticmethod
    def is_on_device(tensor: torch.Tensor) -> bool:
        return tensor.dtype == torch.float32


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
    assert "rank 0 calls all_reduce(float32 (5,), sum, native), rank 1 calls barrier()" in said
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


def ranks_that_differ_are_named(world: Group) -> None:
    others: dict[str, Callable[[Group], object]] = {
        "barrier()": Group.barrier,
        "all_reduce(float32 (7,), sum, native)": lambda group: on_device(group, 7),
        "all_reduce(float32 (9,), sum, native)": lambda group: on_device(group, 9),
        "all_reduce(float64 (5,), sum, native)": lambda group: group.all_reduce(
            torch.ones(5, dtype=torch.float64)
        ),
        "all_gather": lambda group: group.all_gather(on_gpu(3)),
    }
    for name, other in others.items():
        group, wire = fresh(world)
        for count in (5, 7):  # these are known from now on, 9 is not
            on_device(group, count)
        said = fails(
            (lambda: other(group)) if world.rank else lambda: on_device(group, 5)  # noqa: B023
        )
        assert "rank 0 calls all_reduce(float32 (5,), sum, native)" in said, said
        assert f"rank 1 calls {name}" in said, said
        assert wire.aborts == 1, name
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
    ranks_that_differ_are_named(world)
    a_lost_rank_is_named(world)
    print("claims were compared beside", flush=True)


if __name__ == "__main__":
    sys.exit(not run_world("shm", 2, timedelta(seconds=LIMIT_SECONDS), body))
