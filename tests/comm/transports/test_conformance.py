"""The suite for all transports, over each of them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from farandole.comm import Group
from farandole.testing.conformance import CHECKS, Check, run_checks
from farandole.testing.conformance.material import DTYPES, WAYS, made, ops, reduced, require_equal

if TYPE_CHECKING:
    from conftest import Sandbox

CONFORM = Path(__file__).parents[1] / "scripts" / "conform.py"


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_threads(on_ranks: Any, size: int, check: Check) -> None:
    for outcome in on_ranks(size, check, timeout_seconds=100):
        if outcome is not None:
            raise outcome


def test_processes(sandbox: Sandbox) -> None:
    worlds = [
        *(("c10d", 3), ("shm", 2), ("shm", 5), ("hosts", 4), ("staged", 3), ("direct", 3)),
        *(("simulated-c10d", 2), ("simulated-shm", 3)),
    ]
    done = sandbox.fork(CONFORM, *(f"{transport}:{size}" for transport, size in worlds))
    assert done.returncode == 0, done.stdout + done.stderr
    passed = f"{len(CHECKS)} checks passed"
    assert done.stdout.splitlines() == [
        f"{transport} {size}: {passed}" for transport, size in worlds
    ]


@pytest.mark.mpi
@pytest.mark.needs("mpi4py")
def test_mpi(sandbox: Sandbox, mpirun: list[str]) -> None:
    done = sandbox.run([*mpirun, "-n", "3", sys.executable, CONFORM, "mpi:3"])
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == f"mpi 3: {len(CHECKS)} checks passed\n"


SHAPES = st.lists(st.integers(0, 6), max_size=4).map(tuple)


@settings(max_examples=60, deadline=None)
@given(
    size=st.integers(1, 5),
    shape=SHAPES,
    turned=st.booleans(),
    way=st.sampled_from(WAYS),
    kind=st.sampled_from([(dtype, op) for dtype in DTYPES for op in ops(dtype)]),
)
def test_all_reduce_of_any_shape(
    on_ranks: Any, size: int, shape: tuple[int, ...], turned: bool, way: str, kind: Any
) -> None:
    dtype, op = kind

    def tensor(rank: int) -> torch.Tensor:
        whole = made(rank, shape, dtype)
        return whole.movedim(0, -1) if turned and shape else whole

    wanted = reduced([tensor(rank) for rank in range(size)], op)
    for result in on_ranks(
        size, lambda group: group.all_reduce(tensor(group.rank), op, algorithm=way)
    ):
        require_equal(result, wanted, f"{way} {op} of {dtype} {shape}")


@settings(max_examples=40, deadline=None)
@given(data=st.data(), shapes=st.lists(SHAPES, min_size=1, max_size=5))
def test_all_gather_of_any_shapes(
    on_ranks: Any, data: st.DataObject, shapes: list[tuple[int, ...]]
) -> None:
    dtype = data.draw(st.sampled_from(DTYPES))
    parts = [made(rank, shape, dtype) for rank, shape in enumerate(shapes)]
    for gathered in on_ranks(len(shapes), lambda group: group.all_gather(parts[group.rank])):
        for got, wanted in zip(gathered, parts, strict=True):
            require_equal(got, wanted, f"one of {shapes}")


@settings(max_examples=40, deadline=None)
@given(data=st.data(), size=st.integers(1, 4))
def test_all_to_all_of_any_lengths(on_ranks: Any, data: st.DataObject, size: int) -> None:
    rows = st.lists(st.integers(0, 5), min_size=size, max_size=size)
    lengths = data.draw(st.lists(rows, min_size=size, max_size=size))

    def part(source: int, to: int) -> torch.Tensor:
        return made(source, (lengths[source][to], 2), salt=to)

    def body(group: Group) -> list[torch.Tensor]:
        return group.all_to_all([part(group.rank, to) for to in range(size)])

    for rank, taken in enumerate(on_ranks(size, body)):
        for source, got in enumerate(taken):
            require_equal(got, part(source, rank), f"from {source} to {rank} of {lengths}")


def test_a_check_that_fails_is_reported_by_every_rank(on_ranks: Any) -> None:
    """The suite itself: what one rank finds wrong, all ranks tell, and it goes no further."""

    def check_something(group: Group) -> None:
        group.barrier()
        assert group.rank != 1, "wrong on rank one"

    def never_reached(group: Group) -> None:
        raise NotImplementedError

    for failures in on_ranks(3, lambda group: run_checks(group, [check_something, never_reached])):
        (failure,) = failures
        assert failure.startswith("check_something on rank 1 of 3:\nTraceback")
        assert "wrong on rank one" in failure


def test_a_check_that_breaks_the_group_is_reported_too(on_ranks: Any) -> None:
    def check_something(group: Group) -> None:
        if group.rank:
            group.receive(torch.zeros(1), source=0)

    def check(group: Group) -> list[str]:
        return run_checks(group, [check_something])

    zero, one = on_ranks(2, check, timeout_seconds=0.2)
    assert len(zero) == len(one) == 1
    assert "receive from rank 0 failed on rank 1 of 2" in one[0]
