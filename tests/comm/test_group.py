"""What a `Group` adds to its transport. That its collectives are right: test_conformance.py."""

from __future__ import annotations

import copy
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from farandole.comm import Group
from farandole.comm.meter import ring_bytes
from farandole.errors import CommError, UserError
from farandole.testing import run_world
from farandole.train import Run


def test_a_future_holds_the_same_tensor(on_ranks: Any) -> None:
    def body(group: Group) -> list[Any]:
        outcomes = []
        for last in (False, True):
            mine = torch.tensor([1.0, 3.0 * group.rank])
            done = group.average_future(mine, last=last).wait()
            outcomes.append((done.data_ptr() == mine.data_ptr(), mine.tolist()))
        return outcomes

    assert on_ranks(3, body) == [[(True, [1.0, 3.0])] * 2] * 3


def test_the_last_future_comes_after_those_before_it(on_ranks: Any) -> None:
    def body(group: Group) -> list[float]:
        tensors = [torch.full((1000,), float(n * (group.rank + 1))) for n in range(20)]
        before = [group.average_future(tensor) for tensor in tensors[:-1]]
        group.average_future(tensors[-1], last=True)
        assert all(future.done() for future in before)
        return [float(tensor[0]) for tensor in tensors]

    assert on_ranks(3, body) == [[2.0 * n for n in range(20)]] * 3


def test_average_over_a_process_group_s_own_operation(on_ranks: Any) -> None:
    """c10d's AVG, which `Group` itself does not use, but DDP's own hooks may."""

    def body(group: Group) -> list[float]:
        options = torch.distributed.AllreduceOptions()
        options.reduceOp = torch.distributed.ReduceOp.AVG
        mine = torch.tensor([2.0 * group.rank])
        group.process_group.allreduce([mine], options).wait()
        return mine.tolist()

    assert on_ranks(3, body) == [[2.0]] * 3


def test_an_operation_that_only_c10d_knows_is_refused(on_ranks: Any) -> None:
    def body(group: Group) -> None:
        options = torch.distributed.AllreduceOptions()
        options.reduceOp = torch.distributed.ReduceOp.BXOR
        group.process_group.allreduce([torch.ones(1)], options)

    for error in on_ranks(2, body):
        assert isinstance(error, CommError)
        assert "sum, average, min, max and product" in str(error)


def test_broadcast_all_in_several_messages(on_ranks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("farandole.comm.tensors._FLAT_BYTES", 64)

    def body(group: Group) -> tuple[list[float], int]:
        tensors = [torch.full((10,), float(group.rank + n)) for n in range(5)]
        group.broadcast_all(tensors, source=1)
        return [float(tensor[0]) for tensor in tensors], group.meter.bytes_sent

    values, sent = zip(*on_ranks(2, body), strict=True)
    assert values == ([1.0, 2.0, 3.0, 4.0, 5.0],) * 2
    assert sent == (0, 200)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=25, deadline=None)
@given(values=st.lists(JSON, min_size=1, max_size=4), data=st.data())
def test_json_travels_unchanged(on_ranks: Any, values: list[Any], data: st.DataObject) -> None:
    source = data.draw(st.integers(0, len(values) - 1))

    def body(group: Group) -> tuple[list[Any], Any]:
        mine = values[group.rank]
        return group.gather_json(mine), group.broadcast_json(mine, source)

    assert on_ranks(len(values), body) == [(values, values[source])] * len(values)


def test_a_rank_that_never_comes_is_named_within_the_timeout(on_ranks: Any) -> None:
    def body(group: Group) -> list[str]:
        if group.rank == 1:
            return []
        said = []
        for _ in range(2):
            with pytest.raises(CommError) as caught:
                group.barrier()
            said.append(str(caught.value))
        return said

    zero, one, two = on_ranks(3, body, timeout_seconds=2.0)  # ranks 0 and 2 come within it
    assert one == []
    for rank, (first, again) in ((0, zero), (2, two)):
        assert first.startswith(
            f"barrier failed on rank {rank} of 3: rank 1 did not answer within 2 s. "
            "See the output of rank 1; if it is only slow, fd.init(timeout=…) allows more."
        )
        assert again == (
            f"barrier on rank {rank} of 3: the group was broken by an earlier failure: "
            "rank 1 did not answer within 2 s."
        )


def test_a_late_rank_does_not_meet_a_round_that_others_have_left(on_ranks: Any) -> None:
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

    for error in on_ranks(2, body, timeout_seconds=0.1):
        assert isinstance(error, CommError)
        assert "rank 1 did not answer" in str(error)


def test_a_rank_that_fails_wakes_the_others(tmp_path: Path) -> None:
    woken: dict[int, Exception] = {}

    def body(run: Run) -> None:
        run.group.barrier()  # all have begun
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


def test_a_rank_that_fails_wakes_those_in_a_subgroup(tmp_path: Path) -> None:
    """There it has another number, and that is what its members know it by."""
    woken: list[str] = []

    def body(run: Run) -> None:
        turned = run.group.subgroup([1, 0])
        if run.rank == 1:
            raise KeyError("lost on rank one")
        with pytest.raises(CommError) as caught:
            turned.barrier()
        woken.append(str(caught.value))

    with pytest.raises(KeyError, match="lost on rank one"):
        run_world(2, body, folder=tmp_path, timeout=timedelta(seconds=60))
    assert len(woken) == 1
    assert "barrier failed on rank 1 of 2: rank 0 failed: KeyError" in woken[0]


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


def test_all_to_all_of_tensors_in_several_places(on_ranks: Any) -> None:
    def body(group: Group) -> str:
        with pytest.raises(UserError) as found:
            group.all_to_all([torch.zeros(2), torch.zeros(2, device="meta")])
        return str(found.value)

    (said,) = set(on_ranks(2, body))
    assert said == "all_to_all wants tensors on one device, not on cpu and meta."


def test_bytes_and_waiting_are_metered(on_ranks: Any) -> None:
    def body(group: Group) -> tuple[int, bool]:
        group.all_reduce(torch.zeros(100))
        group.all_gather(torch.zeros(10))
        group.broadcast(torch.zeros(5), source=3)
        group.all_to_all([torch.zeros(2)] * 4)
        group.reduce_scatter(torch.zeros(4))
        return group.meter.bytes_sent, group.meter.waited_seconds > 0

    common = ring_bytes(400, 4) + 3 * 40 + 3 * 8 + 3 * 4
    assert on_ranks(4, body) == [(common, True)] * 3 + [(common + 20, True)]


def test_a_group_alone_sends_nothing(on_ranks: Any) -> None:
    def body(group: Group) -> tuple[float, list[Any], int]:
        group.barrier()
        total = float(group.all_reduce(torch.tensor(3.0)))
        return total, group.gather_json("x"), group.meter.bytes_sent

    assert on_ranks(1, body) == [(3.0, ["x"], 0)]


def test_a_copied_layer_keeps_its_connection(on_ranks: Any) -> None:
    """`copy.deepcopy(model)`, as for a moving average of weights, must work."""

    def body(group: Group) -> bool:
        return copy.deepcopy([group])[0] is group

    assert on_ranks(1, body) == [True]
