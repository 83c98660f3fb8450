"""Horovod's error contract, operation by operation: what is raised, where, and what works after it.

Taken from the documentation and the public tests of Horovod 0.28.1. It comes down to four rules,
each a table here:

    a wrong argument          ValueError at the call, on its caller alone; others wait or go on
    ranks that disagree       HorovodInternalError, a RuntimeError, on all who asked, when they wait
    ranks that have joined    HorovodInternalError on those who ask for anything but a reduction
    ranks that have left      HorovodInternalError on those who wait for them, and ever after
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import farandole.horovod.torch as hvd
from farandole.horovod.common.exceptions import HorovodInternalError
from farandole.horovod.session import current
from farandole.horovod.settings import Settings
from farandole.testing.horovod import run_horovod

PATIENCE_SECONDS = 150.0
SIZE = 3


def rows() -> torch.Tensor:
    """Can be divided by the number of ranks, in any operation."""
    return torch.ones(SIZE, 2)


def require_that_all_goes_on() -> None:
    """On every rank: names and counters are where they should be."""
    assert hvd.allreduce(rows(), op=hvd.Sum).tolist() == [[SIZE] * 2] * SIZE
    assert hvd.allgather(torch.tensor([hvd.rank()])).tolist() == list(range(SIZE))
    hvd.barrier()
    assert hvd.broadcast_object({"from": hvd.rank()}, root_rank=1) == {"from": 1}


# A wrong argument


def optimizer(**options: Any) -> Any:
    model = nn.Linear(2, 2)
    return hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), **options)


def after_backward(op: str = hvd.Average) -> Any:
    model = nn.Linear(2, 2)
    found = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), op=op)
    found.model = model
    model(torch.ones(1, 2)).sum().backward()
    return found


def several_names() -> list[tuple[str, nn.Parameter]]:
    return [(name, p) for _ in range(2) for name, p in nn.Linear(1, 1).named_parameters()]


def twice_backward() -> None:
    found = after_backward()
    F.mse_loss(found.model(torch.ones(1, 2)), torch.ones(1, 2)).backward()


def lbfgs() -> torch.optim.Optimizer:
    return torch.optim.LBFGS(nn.Linear(1, 1).parameters())


WRONG: dict[str, tuple[type[Exception], Callable[[], Any]]] = {
    "allreduce op and average": (
        ValueError,
        lambda: hvd.allreduce(rows(), average=True, op=hvd.Sum),
    ),
    "allreduce no such op": (ValueError, lambda: hvd.allreduce(rows(), op="mean of means")),
    "allreduce unknown set": (
        ValueError,
        lambda: hvd.allreduce(rows(), process_set=hvd.ProcessSet([0])),
    ),
    "allreduce after removal": (ValueError, lambda: hvd.allreduce(rows(), process_set=removed())),
    "grouped of nothing": (ValueError, lambda: hvd.grouped_allreduce([])),
    "allgather unknown set": (
        ValueError,
        lambda: hvd.allgather(rows(), process_set=hvd.ProcessSet([0])),
    ),
    "broadcast no such root": (ValueError, lambda: hvd.broadcast(rows(), root_rank=SIZE)),
    "broadcast_ no such root": (ValueError, lambda: hvd.broadcast_(rows(), root_rank=-1)),
    "broadcast_parameters of a number": (ValueError, lambda: hvd.broadcast_parameters(3, 0)),
    "broadcast_optimizer_state of LBFGS": (
        ValueError,
        lambda: hvd.broadcast_optimizer_state(lbfgs(), 0),
    ),
    "alltoall rows not even": (ValueError, lambda: hvd.alltoall(torch.ones(SIZE + 1))),
    "alltoall splits too many": (
        ValueError,
        lambda: hvd.alltoall(torch.ones(SIZE - 1), torch.ones(SIZE, dtype=torch.int32)),
    ),
    "alltoall splits not whole": (ValueError, lambda: hvd.alltoall(rows(), torch.ones(SIZE))),
    "alltoall splits for too few": (ValueError, lambda: hvd.alltoall(rows(), [1, 1])),
    "reducescatter of a scalar": (ValueError, lambda: hvd.reducescatter(torch.tensor(1.0))),
    "grouped reducescatter of a scalar": (
        ValueError,
        lambda: hvd.grouped_reducescatter([rows(), torch.tensor(1.0)]),
    ),
    "reducescatter adasum": (RuntimeError, lambda: hvd.reducescatter(rows(), op=hvd.Adasum)),
    "reducescatter_async adasum": (
        HorovodInternalError,
        lambda: hvd.reducescatter_async(rows(), op=hvd.Adasum),
    ),
    "grouped reducescatter adasum": (
        HorovodInternalError,
        lambda: hvd.grouped_reducescatter([rows()], op=hvd.Adasum),
    ),
    "sparse allreduce of a maximum": (
        ValueError,
        lambda: hvd.sparse_allreduce_async(rows().to_sparse(), "s", hvd.Max),
    ),
    "poll of no handle": (ValueError, lambda: hvd.poll(12345)),
    "process set of words": (ValueError, lambda: hvd.ProcessSet(["0"])),
    "process set of too many": (ValueError, lambda: hvd.add_process_set([0, SIZE])),
    "optimizer names twice": (ValueError, lambda: optimizer(named_parameters=several_names())),
    "optimizer names for others": (
        ValueError,
        lambda: optimizer(named_parameters=nn.Linear(1, 1).named_parameters()),
    ),
    "optimizer names alone": (ValueError, lambda: optimizer(named_parameters=["weight"])),
    "optimizer predivide of a sum": (
        ValueError,
        lambda: optimizer(gradient_predivide_factor=2.0, op=hvd.Sum),
    ),
    "optimizer groups below 0": (ValueError, lambda: optimizer(groups=-1)),
    "optimizer groups of tensors": (ValueError, lambda: optimizer(groups=[torch.ones(1)])),
    "SyncBatchNorm of one dimension": (
        ValueError,
        lambda: hvd.SyncBatchNorm(2)(torch.ones(2)),
    ),
}


def removed() -> hvd.ProcessSet:
    """As a set is that has been removed."""
    found = hvd.ProcessSet([0, 1])
    found.process_set_id = 77
    return found


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_argument_is_its_callers_alone(what: str) -> None:
    kind, call = WRONG[what]

    def body() -> None:
        if hvd.rank() == 0:
            with pytest.raises(kind) as told:
                call()
            assert isinstance(told.value, RuntimeError) == issubclass(kind, RuntimeError)
        require_that_all_goes_on()

    run_horovod(SIZE, body)


def test_a_process_set_is_for_its_members_and_is_added_once() -> None:
    def body() -> None:
        some = hvd.add_process_set([0, 2])
        with pytest.raises(ValueError, match="already"):
            hvd.add_process_set([2, 0])
        with pytest.raises(ValueError, match="already"):
            hvd.add_process_set(range(SIZE))
        if some.included():
            assert hvd.allreduce(rows(), op=hvd.Sum, process_set=some)[0, 0] == 2.0
        else:
            for call in (hvd.allreduce, hvd.allgather, hvd.alltoall, hvd.reducescatter):
                with pytest.raises(ValueError, match="not in the process set"):
                    call(torch.ones(4), process_set=some)
            with pytest.raises(ValueError, match="not in the process set"):
                hvd.barrier(process_set=some)
        if hvd.rank() == 0:
            with pytest.raises(ValueError, match="root rank 1 is not among"):
                hvd.broadcast(rows(), root_rank=1, process_set=some)
        assert not hvd.remove_process_set(hvd.global_process_set)
        assert hvd.remove_process_set(some)
        assert not hvd.remove_process_set(some)
        require_that_all_goes_on()

    run_horovod(SIZE, body)


# Names in flight

START: dict[str, Callable[[str], Any]] = {
    "allreduce_async": lambda name: hvd.allreduce_async(rows(), name=name),
    "allreduce_async_": lambda name: hvd.allreduce_async_(rows(), name=name),
    "grouped_allreduce_async": lambda name: hvd.grouped_allreduce_async([rows()], name=name),
    "allgather_async": lambda name: hvd.allgather_async(rows(), name=name),
    "grouped_allgather_async": lambda name: hvd.grouped_allgather_async([rows()], name=name),
    "broadcast_async": lambda name: hvd.broadcast_async(rows(), 0, name=name),
    "broadcast_async_": lambda name: hvd.broadcast_async_(rows(), 0, name=name),
    "alltoall_async": lambda name: hvd.alltoall_async(rows(), name=name),
    "reducescatter_async": lambda name: hvd.reducescatter_async(rows(), name=name),
    "grouped_reducescatter_async": lambda name: hvd.grouped_reducescatter_async(
        [rows()], name=name
    ),
    "sparse_allreduce_async": lambda name: hvd.sparse_allreduce_async(rows().to_sparse(), name),
}


@pytest.mark.parametrize("what", START)
def test_a_name_in_flight_is_refused_at_once_and_the_first_goes_on(what: str) -> None:
    start, refused = START[what], threading.Event()

    def body() -> None:
        if hvd.rank() == 0:
            handle = start("d")
            with pytest.raises(ValueError, match="was asked for again"):
                start("d")
            refused.set()
        else:
            assert refused.wait(PATIENCE_SECONDS)
            handle = start("d")
        assert hvd.synchronize(handle) is not None
        assert hvd.synchronize(start("d")) is not None
        require_that_all_goes_on()

    run_horovod(SIZE, body)


def test_a_name_that_follows_at_once_is_in_flight_also_where_all_others_have_asked() -> None:
    """What nobody waits for is done a cycle later, here a long one."""

    def body() -> None:
        if hvd.rank() == 0:
            handle = hvd.allgather_async(rows(), name="d")
        hvd.barrier()
        if hvd.rank() > 0:
            handle = hvd.allgather_async(rows(), name="d")
            with pytest.raises(ValueError, match="was asked for again"):
                hvd.allgather_async(rows(), name="d")
        hvd.barrier()
        assert len(hvd.synchronize(handle)) == SIZE**2
        require_that_all_goes_on()

    run_horovod(SIZE, body, settings=Settings(cycle_seconds=0.2))


def test_the_same_name_is_free_for_another_operation_and_another_set() -> None:
    def body() -> None:
        some = hvd.add_process_set([0, 1])
        in_place = ("allreduce_async_", "broadcast_async_")  # the same names as the others
        handles = [start("d") for what, start in START.items() if what not in in_place]
        if some.included():
            handles.append(hvd.allreduce_async(rows(), name="d", process_set=some))
        for handle in handles:
            assert hvd.synchronize(handle) is not None
        require_that_all_goes_on()

    run_horovod(SIZE, body)


# Ranks that disagree

DISAGREE: dict[str, Callable[[int], Any]] = {
    "allreduce sizes": lambda r: hvd.allreduce_async(torch.ones(3 + r)),
    "allreduce dimensions": lambda r: hvd.allreduce_async(torch.ones([2, 6] if r else [2, 2, 3])),
    "allreduce dtypes": lambda r: hvd.allreduce_async(torch.ones(2).to(_dtype(r))),
    "allreduce ops": lambda r: hvd.allreduce_async(rows(), op=hvd.Min if r else hvd.Max),
    "allreduce factors": lambda r: hvd.allreduce_async(rows(), prescale_factor=1.0 + r),
    "grouped numbers": lambda r: hvd.grouped_allreduce_async([rows()] * (1 + r)),
    "grouped sizes": lambda r: hvd.grouped_allreduce_async([rows(), torch.ones(1 + r)]),
    "allgather columns": lambda r: hvd.allgather_async(torch.ones(2, 1 + r)),
    "allgather dtypes": lambda r: hvd.allgather_async(torch.ones(2).to(_dtype(r))),
    "broadcast sizes": lambda r: hvd.broadcast_async(torch.ones(3 + r), 0),
    "broadcast dtypes": lambda r: hvd.broadcast_async(torch.ones(2).to(_dtype(r)), 0),
    "broadcast roots": lambda r: hvd.broadcast_async(rows(), r),
    "alltoall columns": lambda r: hvd.alltoall_async(torch.ones(SIZE, 1 + r)),
    "alltoall dtypes": lambda r: hvd.alltoall_async(torch.ones(SIZE).to(_dtype(r))),
    "reducescatter sizes": lambda r: hvd.reducescatter_async(torch.ones(3 + r)),
    "reducescatter dtypes": lambda r: hvd.reducescatter_async(torch.ones(3).to(_dtype(r))),
    "reducescatter factors": lambda r: hvd.reducescatter_async(rows(), postscale_factor=1.0 + r),
}


def _dtype(rank: int) -> torch.dtype:
    return torch.int32 if rank % 2 else torch.float32


@pytest.mark.parametrize("what", DISAGREE)
def test_a_disagreement_is_told_to_all_when_they_wait(what: str) -> None:
    def body() -> str:
        handle = DISAGREE[what](hvd.rank())
        with pytest.raises(HorovodInternalError) as told:
            hvd.synchronize(handle)
        assert isinstance(told.value, RuntimeError)
        assert not isinstance(told.value, ValueError)
        assert hvd.poll(handle)  # what has failed is done
        require_that_all_goes_on()
        return str(told.value)

    assert len(set(run_horovod(SIZE, body))) == 1


# Ranks that have joined

JOINED_BEFORE: dict[str, Callable[[], Any]] = {
    "allgather": lambda: hvd.allgather(rows()),
    "grouped_allgather": lambda: hvd.grouped_allgather([rows(), rows()]),
    "broadcast": lambda: hvd.broadcast(rows(), 2),
    "broadcast_": lambda: hvd.broadcast_(rows(), 2),
    "alltoall": lambda: hvd.alltoall(rows()),
    "reducescatter": lambda: hvd.reducescatter(rows(), op=hvd.Sum),
    "grouped_reducescatter": lambda: hvd.grouped_reducescatter([rows()]),
    "sparse_allreduce": lambda: hvd.sparse_allreduce(rows().to_sparse()),
    "broadcast_object": lambda: hvd.broadcast_object([1], root_rank=2),
    "allgather_object": lambda: hvd.allgather_object([1]),
    "broadcast_parameters": lambda: hvd.broadcast_parameters({"w": rows()}, 2),
}


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("what", JOINED_BEFORE)
def test_while_a_rank_has_joined_only_reductions_are_done(what: str, first: int) -> None:
    """And all can go on to join, and from there to the next collective."""

    def body() -> int:
        if hvd.rank() != first:
            # Asked for before or after the other one joins: both come to the same.
            with pytest.raises(RuntimeError, match=f"every rank, and rank {first} has joined"):
                JOINED_BEFORE[what]()
            assert hvd.allreduce(rows(), op=hvd.Sum, name="x")[0, 0] == SIZE - 1
            pair = hvd.grouped_allreduce([rows(), rows()], op=hvd.Sum, name="x")
            assert [one[0, 0].item() for one in pair] == [SIZE - 1] * 2
        last = hvd.join()
        assert hvd.allgather_object(last) == [last] * SIZE
        require_that_all_goes_on()
        return last

    (last,) = set(run_horovod(SIZE, body))
    assert last != first


# Ranks that have left

WAITS: dict[str, Callable[[Any], Any]] = {
    "allreduce": lambda some: hvd.allreduce(rows(), name="x"),
    "allgather": lambda some: hvd.allgather(rows(), name="x"),
    "join": lambda some: hvd.join(),
    "barrier": lambda some: hvd.barrier(),
    "barrier of a set without it": lambda some: hvd.barrier(some),
    "allreduce of a set without it": lambda some: hvd.allreduce(rows(), process_set=some),
}


@pytest.mark.parametrize("what", WAITS)
def test_a_rank_that_leaves_is_told_to_all_who_wait_or_ask_later(what: str) -> None:
    """Rank 0 leaves, rank 1 waits; rank 2 is busy with something else. Neither leaves before the
    other has asked: it would hear of the one that left last."""
    heard, asked = threading.Event(), threading.Barrier(2, timeout=PATIENCE_SECONDS)
    left = r"rank 0 has called hvd.shutdown\(\)"

    def body() -> None:
        rank, some = hvd.rank(), hvd.add_process_set([1, 2])
        if rank == 1:
            with pytest.raises(HorovodInternalError, match=left):
                WAITS[what](some)
            heard.set()
        elif rank == 2:
            assert heard.wait(PATIENCE_SECONDS)
        if rank != 0:
            for group in (some, hvd.global_process_set):  # rank 2 may hear of it only now
                with pytest.raises(HorovodInternalError, match=left):
                    hvd.barrier(group)
            for call in (hvd.barrier, hvd.join):
                with pytest.raises(HorovodInternalError, match=f"has ended: {left}"):
                    call()
            asked.wait()
        hvd.shutdown()
        assert_not_initialized()

    run_horovod(SIZE, body)


def assert_not_initialized() -> None:
    """Questions are a `ValueError` then, and collectives a `HorovodInternalError`."""
    for question in (hvd.rank, hvd.size, hvd.local_rank, hvd.is_homogeneous):
        with pytest.raises(ValueError, match=r"use hvd.init\(\)"):
            question()
    for call in (hvd.allreduce, hvd.allgather, hvd.alltoall, hvd.reducescatter):
        with pytest.raises(HorovodInternalError, match=r"use hvd.init\(\)"):
            call(rows())
    for wait in (hvd.join, hvd.barrier):
        with pytest.raises(HorovodInternalError, match=r"use hvd.init\(\)"):
            wait()


def test_two_joins_of_a_rank_are_a_wrong_call() -> None:
    def body() -> None:
        if hvd.rank() == 0:
            engine = current().engine(hvd.global_process_set)
            from farandole.horovod.engine.requests import Request
            from farandole.horovod.engine.work import Work

            first = Work(Request("join", "join"), [])
            engine.join(first)
            with pytest.raises(ValueError, match="under way on this rank already"):
                hvd.join()
            engine.wait(first)
        else:
            hvd.join()
        require_that_all_goes_on()

    run_horovod(SIZE, body)


def test_a_timeline_may_be_started_over_another_and_stopped_without_one(tmp_path: Path) -> None:
    def body() -> None:
        hvd.stop_timeline()
        for name in ("one.json", "one.json", "two.json"):
            hvd.start_timeline(tmp_path / name)
            hvd.allreduce(rows(), name=f"in {name}")
        hvd.stop_timeline()
        require_that_all_goes_on()

    run_horovod(SIZE, body)
    for name in ("one.json", "two.json"):
        text = (tmp_path / name).read_text()
        assert [other for other in ("one.json", "two.json") if f"in {other}" in text] == [name]


# Optimizers: what is called in the wrong order is an AssertionError


def test_gradients_under_way_are_neither_zeroed_nor_made_again() -> None:
    def body() -> None:
        found = after_backward()
        with pytest.raises(AssertionError, match=r"before optimizer.step\(\) or optimizer.synchr"):
            found.zero_grad()
        found.step()
        with pytest.raises(AssertionError, match="Raise backward_passes_per_step"):
            twice_backward()
        with pytest.raises(AssertionError), after_backward(hvd.Adasum).skip_synchronize():
            pass
        require_that_all_goes_on()

    run_horovod(SIZE, body)


def test_a_compressor_without_its_methods() -> None:
    from farandole.horovod.torch.compression import Compressor

    def body() -> None:
        with pytest.raises(NotImplementedError):
            hvd.allreduce(rows(), compression=Compressor)
        require_that_all_goes_on()

    run_horovod(SIZE, body)
