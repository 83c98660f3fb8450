"""Beginning and end, who is where, process sets; and that all of Horovod's names are here."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import farandole.horovod.torch as hvd
from farandole.errors import UserError
from farandole.horovod.torch import mpi_ops
from farandole.testing.horovod import run_horovod
from farandole.topology import Topology

REDUCED = "tensor average=None name=None op=None prescale_factor=1.0 postscale_factor=1.0"
SCATTERED = "name=None op=average process_set= prescale_factor=1.0 postscale_factor=1.0"
SIGNATURES = {
    "init": "comm=None process_sets=None",
    "shutdown": "",
    "is_initialized": "",
    "start_timeline": "file_path mark_cycles=False",
    "stop_timeline": "",
    "size": "",
    "local_size": "",
    "cross_size": "",
    "rank": "",
    "local_rank": "",
    "cross_rank": "",
    "is_homogeneous": "",
    "mpi_threads_supported": "",
    "mpi_enabled": "",
    "mpi_built": "",
    "gloo_enabled": "",
    "gloo_built": "",
    "nccl_built": "",
    "ddl_built": "",
    "ccl_built": "",
    "cuda_built": "",
    "rocm_built": "",
    "ProcessSet": "ranks",
    "add_process_set": "process_set",
    "remove_process_set": "process_set",
    "allreduce": REDUCED.replace("name=None", "name=None compression=") + " process_set=",
    "allreduce_": REDUCED + " process_set=",
    "allreduce_async": REDUCED + " process_set=",
    "allreduce_async_": REDUCED + " process_set=",
    "grouped_allreduce": "tensors average=None name=None compression= op=None "
    "prescale_factor=1.0 postscale_factor=1.0 process_set=",
    "grouped_allreduce_": REDUCED.replace("tensor", "tensors") + " process_set=",
    "grouped_allreduce_async": REDUCED.replace("tensor", "tensors") + " process_set=",
    "grouped_allreduce_async_": REDUCED.replace("tensor", "tensors") + " process_set=",
    "sparse_allreduce_async": "tensor name=None op=None process_set=",
    "allgather": "tensor name=None process_set=",
    "allgather_async": "tensor name=None process_set=",
    "grouped_allgather": "tensors name=None process_set=",
    "grouped_allgather_async": "tensors name=None process_set=",
    "broadcast": "tensor root_rank name=None process_set=",
    "broadcast_": "tensor root_rank name=None process_set=",
    "broadcast_async": "tensor root_rank name=None process_set=",
    "broadcast_async_": "tensor root_rank name=None process_set=",
    "alltoall": "tensor splits=None name=None process_set=",
    "alltoall_async": "tensor splits=None name=None process_set=",
    "reducescatter": "tensor " + SCATTERED.replace("name=None", "name=None compression="),
    "reducescatter_async": "tensor " + SCATTERED,
    "grouped_reducescatter": "tensors " + SCATTERED.replace("name=None", "name=None compression="),
    "grouped_reducescatter_async": "tensors " + SCATTERED,
    "join": "device=-1",
    "barrier": "process_set=",
    "poll": "handle",
    "synchronize": "handle",
    "DistributedOptimizer": "optimizer named_parameters=None compression= "
    "backward_passes_per_step=1 op=average gradient_predivide_factor=1.0 num_groups=0 "
    "groups=None sparse_as_dense=False process_set=",
    "broadcast_parameters": "params root_rank process_set=",
    "broadcast_optimizer_state": "optimizer root_rank model=None process_set=",
    "broadcast_object": "obj root_rank=0 name=None process_set=",
    "broadcast_object_fn": "root_rank=0 name=None process_set=",
    "allgather_object": "obj name=None process_set=",
    "SyncBatchNorm": "num_features eps=1e-05 momentum=0.1 affine=True track_running_stats=True "
    "process_set=",
}
VALUES = [
    "Adasum",
    "Average",
    "Compression",
    "HorovodInternalError",
    "Max",
    "Min",
    "Product",
    "ReduceOp",
    "Sum",
    "global_process_set",
    "sparse_allreduce",
]


def parameters(name: str) -> str:
    """As in SIGNATURES; defaults that are objects are checked by themselves."""
    words = []
    for word, parameter in inspect.signature(getattr(hvd, name)).parameters.items():
        default = parameter.default
        if default is parameter.empty:
            words.append(word)
        elif word == "process_set":
            assert default is hvd.global_process_set
            words.append(f"{word}=")
        elif word == "compression":
            assert default is hvd.Compression.none
            words.append(f"{word}=")
        else:
            words.append(f"{word}={default}")
    return " ".join(words)


@pytest.mark.parametrize("name", SIGNATURES)
def test_the_signature(name: str) -> None:
    assert parameters(name) == SIGNATURES[name]


def test_the_names() -> None:
    assert set(hvd.__all__) - {"elastic"} == {*SIGNATURES, *VALUES}
    assert hasattr(hvd, "elastic")
    for name in mpi_ops.__all__:
        assert getattr(mpi_ops, name) is getattr(hvd, name)
    assert len({hvd.Average, hvd.Sum, hvd.Adasum, hvd.Min, hvd.Max, hvd.Product}) == 6
    assert issubclass(hvd.HorovodInternalError, RuntimeError)
    assert {"none", "fp16", "bf16"} <= vars(hvd.Compression).keys()


# Beginning and end

AFTER_INIT: dict[str, Callable[[], Any]] = {
    "rank": hvd.rank,
    "size": hvd.size,
    "local_rank": hvd.local_rank,
    "local_size": hvd.local_size,
    "cross_rank": hvd.cross_rank,
    "cross_size": hvd.cross_size,
    "is_homogeneous": hvd.is_homogeneous,
    "mpi_threads_supported": hvd.mpi_threads_supported,
    "mpi_enabled": hvd.mpi_enabled,
    "allreduce": lambda: hvd.allreduce(torch.ones(1)),
    "allreduce_async_": lambda: hvd.allreduce_async_(torch.ones(1)),
    "grouped_allreduce": lambda: hvd.grouped_allreduce([torch.ones(1)]),
    "allgather": lambda: hvd.allgather(torch.ones(1)),
    "broadcast": lambda: hvd.broadcast(torch.ones(1), 0),
    "alltoall": lambda: hvd.alltoall(torch.ones(1)),
    "reducescatter": lambda: hvd.reducescatter(torch.ones(1)),
    "join": hvd.join,
    "barrier": hvd.barrier,
    "add_process_set": lambda: hvd.add_process_set([0]),
    "remove_process_set": lambda: hvd.remove_process_set(hvd.ProcessSet([0])),
    "start_timeline": lambda: hvd.start_timeline("x.json"),
    "stop_timeline": hvd.stop_timeline,
    "global_process_set.size": hvd.global_process_set.size,
    "global_process_set.rank": hvd.global_process_set.rank,
    "DistributedOptimizer": lambda: hvd.DistributedOptimizer(
        torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    ),
    "broadcast_object": lambda: hvd.broadcast_object(1),
}


@pytest.mark.parametrize("name", AFTER_INIT)
def test_before_init(name: str) -> None:
    assert not hvd.is_initialized()
    with pytest.raises(ValueError, match=r"Horovod has not been initialized; use hvd.init\(\)"):
        AFTER_INIT[name]()


def test_init_and_shutdown_of_one_process() -> None:
    hvd.shutdown()  # of what was never begun
    before = threading.active_count()
    for _ in range(3):
        hvd.init()
        hvd.init()  # again: nothing happens
        assert hvd.is_initialized()
        assert (hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size()) == (0, 1, 0, 1)
        assert hvd.allreduce(torch.full((2,), 3.0)).tolist() == [3.0, 3.0]
        hvd.shutdown()
        assert not hvd.is_initialized()
        hvd.shutdown()
    assert threading.active_count() == before
    assert not dist.is_initialized()  # that is the script's own


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"comm": [0, 1]}, r"comm=\[0, 1\]: all ranks of a job take part"),
        ({"comm": object()}, "all ranks of a job take part"),
        ({"process_sets": "static"}, "process_sets='static': give process sets, or 'dynamic'"),
        ({"process_sets": [[0, 1]]}, "there are ranks 0 to 0"),
        ({"process_sets": [[]]}, "name at least one rank"),
    ],
)
def test_an_init_that_fails_leaves_nothing_behind(arguments: Any, message: str) -> None:
    before = threading.active_count()
    try:
        with pytest.raises(UserError, match=message):
            hvd.init(**arguments)
        assert not hvd.is_initialized()
        assert threading.active_count() == before
    finally:
        hvd.shutdown()


def test_init_with_what_horovod_takes() -> None:
    for comm, sets in (([0], None), (None, "dynamic"), (range(1), [])):
        hvd.init(comm, process_sets=sets)
        try:
            assert hvd.is_initialized()
        finally:
            hvd.shutdown()


# Who is where


@pytest.mark.parametrize(
    ("counts", "homogeneous"), [([4], True), ([2, 2], True), ([3, 1], False), ([1, 2, 1], False)]
)
def test_places(counts: list[int], homogeneous: bool) -> None:
    names = [f"host{i}" for i, count in enumerate(counts) for _ in range(count)]

    def body() -> list[int]:
        assert hvd.size() == 4
        assert hvd.is_homogeneous() == homogeneous
        return [
            hvd.rank(),
            hvd.local_rank(),
            hvd.local_size(),
            hvd.cross_rank(),
            hvd.cross_size(),
        ]

    expected = []
    for host, count in enumerate(counts):
        for place in range(count):
            alike = [i for i, other in enumerate(counts) if other > place]
            expected.append([len(expected), place, count, alike.index(host), len(alike)])
    assert run_horovod(4, body, topology=Topology.from_names(names)) == expected


def test_what_there_is() -> None:
    def body() -> None:
        assert hvd.gloo_built() is True
        assert hvd.gloo_enabled() is True
        assert hvd.mpi_enabled() is False
        assert hvd.mpi_threads_supported() is False
        assert isinstance(hvd.mpi_built(), bool)
        assert isinstance(hvd.nccl_built(), int)
        assert bool(hvd.nccl_built()) == dist.is_nccl_available()
        assert hvd.ddl_built() is False
        assert hvd.ccl_built() is False
        assert hvd.cuda_built() == (torch.version.cuda is not None)
        assert hvd.rocm_built() == (torch.version.hip is not None)

    run_horovod(1, body)


# Process sets


def test_a_process_set_from_its_making_to_its_end() -> None:
    def body() -> None:
        rank = hvd.rank()
        some = hvd.ProcessSet([2, 0, 2])
        assert some.ranks == [0, 2]
        assert (some.process_set_id, some.size(), some.rank(), some.included()) == (None,) * 4
        assert hvd.add_process_set(some) is some
        other = hvd.add_process_set(range(1, 3))
        assert (some.process_set_id, other.process_set_id) == (1, 2)
        assert some.size() == 2
        assert some.included() == (rank in (0, 2))
        if some.included():
            assert some.rank() == [0, 2].index(rank)
        else:
            with pytest.raises(UserError, match="ask included"):
                some.rank()
        assert str(some) == "ProcessSet(process_set_id=1, ranks=[0, 2])"
        with pytest.raises(UserError, match="has been added before"):
            hvd.add_process_set(some)
        with pytest.raises(UserError, match=r"a process set of the ranks \[0, 2\] already"):
            hvd.add_process_set([0, 2])
        with pytest.raises(UserError, match="already"):
            hvd.add_process_set([0, 1, 2])  # that is the global one
        assert hvd.remove_process_set(some) is True
        assert some.process_set_id is None
        assert hvd.remove_process_set(some) is False
        assert hvd.remove_process_set(hvd.global_process_set) is False
        again = hvd.add_process_set(some)
        assert again.process_set_id == 3
        if again.included():
            assert hvd.allreduce(torch.ones(2), process_set=again, op=hvd.Sum).tolist() == [2.0] * 2
        assert hvd.global_process_set.size() == 3
        assert hvd.global_process_set.rank() == rank
        assert hvd.global_process_set.included() is True
        hvd.shutdown()
        assert again.process_set_id is None
        assert hvd.global_process_set.process_set_id == 0

    run_horovod(3, body)


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        ([], "name at least one rank"),
        ([3], r"a process set of \[3\]: there are ranks 0 to 2"),
        ([-1, 0], "there are ranks 0 to 2"),
        (["a"], "process set of"),
        ([0.0, 1], "process set of"),
        ([0, "a"], "process set of"),
        (None, "process set"),
        (3.5, "process set"),
    ],
)
def test_ranks_that_make_no_process_set(ranks: Any, message: str) -> None:
    def body() -> None:
        with pytest.raises(UserError, match=message):
            hvd.add_process_set(ranks)
        with pytest.raises(UserError, match=message):
            hvd.add_process_set(hvd.ProcessSet(ranks))

    run_horovod(3, body)


def test_a_process_set_of_one() -> None:
    def body() -> None:
        alone = hvd.add_process_set([1])
        if hvd.rank() == 1:
            x = torch.ones(2)
            assert hvd.allreduce(x, process_set=alone).tolist() == [1.0, 1.0]
            assert hvd.allgather(x, process_set=alone).tolist() == [1.0, 1.0]
            assert hvd.alltoall(x, process_set=alone).tolist() == [1.0, 1.0]
            assert hvd.reducescatter(x, process_set=alone).tolist() == [1.0, 1.0]
            assert hvd.broadcast(x, 1, process_set=alone).tolist() == [1.0, 1.0]
            hvd.barrier(process_set=alone)

    run_horovod(2, body)


def test_equal_sets_are_equal() -> None:
    assert hvd.ProcessSet([0, 1]) == hvd.ProcessSet(range(2))
    assert hash(hvd.ProcessSet([0, 1])) == hash(hvd.ProcessSet((1, 0)))
    assert hvd.ProcessSet([0]) != hvd.ProcessSet([1])
    assert hvd.ProcessSet(0) == hvd.ProcessSet([0])
