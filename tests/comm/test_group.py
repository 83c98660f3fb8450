"""Collectives of a `Group`, over the in-process world: values, bytes, and what goes wrong."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from farandole.comm import Exchange, Group, InProcessGroup
from farandole.comm.group import Op
from farandole.comm.meter import ring_bytes
from farandole.errors import CommError
from farandole.testing import run_world
from farandole.train import Run


def on_ranks(size: int, body: Callable[[Group], Any], timeout_seconds: float = 30.0) -> list[Any]:
    """`body` on each rank of a bare group; what it returned or raised, by rank."""
    exchange = Exchange(size, timedelta(seconds=timeout_seconds))
    results: list[Any] = [None] * size

    def work(rank: int) -> None:
        group = Group(
            InProcessGroup(exchange, rank), rank=rank, size=size, timeout=exchange.timeout
        )
        try:
            results[rank] = body(group)
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@pytest.mark.parametrize(
    ("op", "expected"),
    [("sum", 1 + 2 + 3), ("average", 2), ("min", 1), ("max", 3), ("product", 6)],
)
def test_all_reduce_operations(op: Op, expected: float) -> None:
    def body(group: Group) -> torch.Tensor:
        mine = torch.full((2, 3), group.rank + 1.0)
        result = group.all_reduce(mine, op)
        assert result is mine
        return result

    for result in on_ranks(3, body):
        assert torch.equal(result, torch.full((2, 3), float(expected)))


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8]
)
def test_all_reduce_keeps_the_dtype(dtype: torch.dtype) -> None:
    def body(group: Group) -> torch.Tensor:
        return group.all_reduce(torch.tensor([group.rank, 2], dtype=dtype))

    for result in on_ranks(3, body):
        assert result.dtype == dtype
        assert result.tolist() == [3, 6]


def test_all_reduce_writes_through_a_view_that_is_not_contiguous() -> None:
    def body(group: Group) -> torch.Tensor:
        whole = torch.zeros(4, 6)
        group.all_reduce(whole[:, ::2].fill_(group.rank + 1))
        return whole

    for whole in on_ranks(2, body):
        assert torch.equal(whole[:, ::2], torch.full((4, 3), 3.0))
        assert not whole[:, 1::2].any()


def test_all_reduce_future_holds_the_same_tensor() -> None:
    def body(group: Group) -> tuple[bool, list[float]]:
        mine = torch.tensor([1.0, group.rank])
        done = group.all_reduce_future(mine).wait()
        return done.data_ptr() == mine.data_ptr(), mine.tolist()

    assert on_ranks(3, body) == [(True, [3.0, 3.0])] * 3


def test_average_over_a_process_group_s_own_operation() -> None:
    """c10d's AVG, which `Group` itself does not use, but DDP's own hooks may."""

    def body(group: Group) -> list[float]:
        options = torch.distributed.AllreduceOptions()
        options.reduceOp = torch.distributed.ReduceOp.AVG
        mine = torch.tensor([2.0 * group.rank])
        group.process_group.allreduce([mine], options).wait()
        return mine.tolist()

    assert on_ranks(3, body) == [[2.0]] * 3


def test_an_unknown_operation_is_refused() -> None:
    def body(group: Group) -> None:
        options = torch.distributed.AllreduceOptions()
        options.reduceOp = torch.distributed.ReduceOp.BXOR
        group.process_group.allreduce([torch.ones(1)], options)

    for error in on_ranks(2, body):
        assert isinstance(error, CommError)
        assert "sum, average, min, max and product" in str(error)


@pytest.mark.parametrize("source", [0, 2])
def test_broadcast(source: int) -> None:
    def body(group: Group) -> tuple[list[float], int]:
        value = group.broadcast(torch.full((3,), float(group.rank)), source).tolist()
        return value, group.meter.bytes_sent

    results = on_ranks(3, body)
    assert [value for value, _ in results] == [[float(source)] * 3] * 3
    assert [sent for _, sent in results] == [12 if rank == source else 0 for rank in range(3)]


def test_broadcast_all_mixes_dtypes_shapes_and_empty_tensors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("farandole.comm.group._FLAT_BYTES", 64)  # several messages
    shapes = [(3,), (), (4, 5), (0, 2), (7,), (2, 2, 2)]
    dtypes = [torch.float32, torch.int64, torch.bfloat16, torch.float32, torch.bool, torch.float64]

    def made(rank: int) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(rank)
        return [
            (torch.rand(shape, generator=generator) * 4).to(dtype)
            for shape, dtype in zip(shapes, dtypes, strict=True)
        ]

    def body(group: Group) -> list[torch.Tensor]:
        tensors = made(group.rank)
        tensors[0].requires_grad_()  # as a parameter does
        tensors[2] = tensors[2].t()  # and one that is not contiguous
        group.broadcast_all(tensors, source=1)
        return tensors

    expected = made(1)
    expected[2] = expected[2].t()
    for tensors in on_ranks(3, body):
        for got, wanted in zip(tensors, expected, strict=True):
            assert got.dtype == wanted.dtype
            assert torch.equal(got.detach(), wanted)


def test_all_gather_is_in_rank_order() -> None:
    def body(group: Group) -> list[int]:
        return [int(part) for part in group.all_gather(torch.tensor(group.rank * 10))]

    assert on_ranks(4, body) == [[0, 10, 20, 30]] * 4


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=25, deadline=None)
@given(values=st.lists(JSON, min_size=1, max_size=4), data=st.data())
def test_json_travels_unchanged(values: list[Any], data: st.DataObject) -> None:
    source = data.draw(st.integers(0, len(values) - 1))

    def body(group: Group) -> tuple[list[Any], Any]:
        mine = values[group.rank]
        return group.gather_json(mine), group.broadcast_json(mine, source)

    assert on_ranks(len(values), body) == [(values, values[source])] * len(values)


def test_mismatched_tensors_fail_on_every_rank_and_the_group_lives_on() -> None:
    def body(group: Group) -> tuple[list[str], list[float]]:
        failures = []
        odd = group.rank == 2
        for bad in (
            lambda: group.all_reduce(torch.zeros(4 if odd else 3)),
            lambda: group.broadcast(torch.zeros(3, dtype=torch.float64 if odd else None)),
            lambda: group.all_gather(torch.zeros(1, 3) if odd else torch.zeros(3, 1)),
        ):
            with pytest.raises(CommError) as caught:
                bad()
            failures.append(str(caught.value))
        return failures, group.all_reduce(torch.ones(1)).tolist()

    for failures, after in on_ranks(3, body):
        shapes, dtypes, order = failures
        assert "rank 0 has (3,)" in shapes
        assert "rank 2 has (4,)" in shapes
        assert "float32" in dtypes
        assert "rank 2 has (3,) torch.float64" in dtypes
        assert "rank 2 has (1, 3)" in order
        assert after == [3.0]


def test_a_rank_that_never_comes_is_named_within_the_timeout() -> None:
    def body(group: Group) -> None:
        if group.rank != 1:
            group.barrier()

    results = on_ranks(3, body, timeout_seconds=0.2)
    assert results[1] is None
    errors = [str(results[0]), str(results[2])]
    assert all(isinstance(results[rank], CommError) for rank in (0, 2))
    assert any("waits for rank(s) [1]" in text and "no answer in 0.2 s" in text for text in errors)


def test_a_late_rank_does_not_meet_a_round_that_others_have_left() -> None:
    """Else it would go on with the values of ranks that have given up."""
    left = threading.Event()

    def body(group: Group) -> Any:
        if group.rank == 1:
            left.wait(10)
            return group.all_reduce(torch.ones(1))
        try:
            return group.all_reduce(torch.ones(1))
        finally:
            left.set()

    early, late = on_ranks(2, body, timeout_seconds=0.1)
    assert isinstance(early, CommError)
    assert isinstance(late, CommError)
    assert "gave up" in str(late)


def test_a_rank_that_fails_wakes_the_others(tmp_path: Path) -> None:
    woken: dict[int, Exception] = {}

    def body(run: Run) -> None:
        if run.rank == 1:
            raise KeyError("lost on rank one")
        try:
            run.group.barrier()
        except CommError as error:
            woken[run.rank] = error
            raise

    with pytest.raises(KeyError, match="lost on rank one"):
        run_world(3, body, folder=tmp_path, timeout=timedelta(seconds=60))
    assert sorted(woken) == [0, 2]
    for error in woken.values():
        assert "rank 1 failed: KeyError" in str(error)


def test_a_rank_that_fails_wakes_one_inside_a_backward_pass(tmp_path: Path) -> None:
    woken: list[BaseException] = []

    def body(run: Run) -> None:
        model = run.distribute(torch.nn.Linear(2, 2))
        loss = model(torch.ones(1, 2)).sum()
        if run.rank == 1:
            raise KeyError("lost on rank one")
        try:
            loss.backward()
        except BaseException as error:
            woken.append(error)
            raise

    with pytest.raises(KeyError, match="lost on rank one"):
        run_world(2, body, folder=tmp_path, timeout=timedelta(seconds=60))
    assert len(woken) == 1
    assert "rank 1 failed" in str(woken[0])


def test_a_group_alone_reduces_to_itself() -> None:
    def body(group: Group) -> tuple[float, list[Any], int]:
        group.barrier()
        total = float(group.all_reduce(torch.tensor(3.0)))
        return total, group.gather_json("x"), group.meter.bytes_sent

    assert on_ranks(1, body) == [(3.0, ["x"], 0)]


def test_bytes_and_waiting_are_metered() -> None:
    def body(group: Group) -> tuple[int, bool]:
        group.all_reduce(torch.zeros(100))
        group.all_gather(torch.zeros(10))
        return group.meter.bytes_sent, group.meter.waited_seconds > 0

    assert on_ranks(4, body) == [(ring_bytes(400, 4) + 3 * 40, True)] * 4


def test_a_copied_layer_keeps_its_connection() -> None:
    """`copy.deepcopy(model)`, as for a moving average of weights, must work."""

    def body(group: Group) -> bool:
        return copy.deepcopy([group])[0] is group

    assert on_ranks(1, body) == [True]
