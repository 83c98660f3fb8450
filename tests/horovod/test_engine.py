"""Ranks that ask for the same things in different orders, from several threads, or not at all."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import farandole.horovod.torch as hvd
from farandole.errors import UserError
from farandole.horovod.common.exceptions import HorovodInternalError
from farandole.horovod.logs import LOGGER
from farandole.horovod.session import current, hold_here, holder
from farandole.horovod.settings import Settings
from farandole.testing.horovod import run_horovod

PATIENCE_SECONDS = 150.0


def wait_for(event: threading.Event) -> None:
    assert event.wait(PATIENCE_SECONDS)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


# Any order

Start = Callable[[str], Any]
Check = Callable[[Any], None]


def numbers(rank: int, *shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    count = torch.Size(shape).numel()
    return (torch.arange(count) % 5 + rank + 1).reshape(shape).to(dtype)


def operation(kind: int, rank: int, size: int) -> tuple[Start, Check]:
    """How to start an operation of some kind, and how its result is checked, on one rank."""
    every = [numbers(r, 2 * size, 3) for r in range(size)]
    mine, stacked = every[rank], torch.stack(every)

    def is_(expected: torch.Tensor) -> Check:
        def check(result: Any) -> None:
            assert result.dtype == expected.dtype
            torch.testing.assert_close(result, expected)

        return check

    if kind == 0:
        return lambda name: hvd.allreduce_async(mine, name=name), is_(stacked.mean(0))
    if kind == 1:
        return lambda name: hvd.allreduce_async(mine, name=name, op=hvd.Max), is_(stacked.amax(0))
    if kind == 2:
        whole = numbers(rank, 7, dtype=torch.int32)
        total = sum(numbers(r, 7, dtype=torch.int32) for r in range(size))
        assert isinstance(total, torch.Tensor)
        return lambda name: hvd.allreduce_async_(whole, name=name, op=hvd.Sum), is_(total)
    if kind == 3:
        both = [numbers(rank, 3, dtype=torch.float32), mine.clone()]

        def check(result: Any) -> None:
            is_(stacked.sum(0))(result[1])
            assert result[0].dtype == torch.float32

        return lambda name: hvd.grouped_allreduce_async(both, name=name, op=hvd.Sum), check
    if kind == 4:
        rows = torch.cat([numbers(r, r + 1, 2) for r in range(size)])
        given = numbers(rank, rank + 1, 2)
        return lambda name: hvd.allgather_async(given, name=name), is_(rows)
    if kind == 5:
        root = size - 1
        return lambda name: hvd.broadcast_async(mine, root, name=name), is_(every[root])
    if kind == 6:
        rows = torch.cat([one.chunk(size)[rank] for one in every])
        return lambda name: hvd.alltoall_async(mine, name=name), lambda r: is_(rows)(r[0])
    if kind == 7:
        part = stacked.sum(0).chunk(size)[rank]
        return lambda name: hvd.reducescatter_async(mine, name=name, op=hvd.Sum), is_(part)
    sparse = torch.sparse_coo_tensor([[0, rank]], [1.0, 2.0], (size,), check_invariants=True)
    dense = torch.full((size,), 2.0)
    dense[0] += size
    return (
        lambda name: hvd.sparse_allreduce_async(sparse, name=name, op=hvd.Sum),
        lambda result: is_(dense)(result.to_dense()),
    )


@settings(max_examples=25)
@given(
    st.sampled_from([1, 2, 3, 4]),
    st.lists(st.lists(st.integers(0, 8), min_size=1, max_size=7), min_size=1, max_size=3),
    st.integers(0, 2**32),
    st.sampled_from([0, 128, 1 << 20]),
    st.sampled_from([0, 2, 1024]),
)
def test_any_order(
    size: int, steps: list[list[int]], seed: int, fusion_bytes: int, cache_capacity: int
) -> None:
    """In each step all ranks ask for the same, each in an order of its own, then wait for it in
    another; what was done before comes again."""

    def body() -> None:
        rank = hvd.rank()
        order = random.Random(seed + rank)
        for kinds in [*steps, steps[0]]:
            asked = []
            for index in order.sample(range(len(kinds)), len(kinds)):
                start, check = operation(kinds[index], rank, size)
                asked.append((start(f"{index}.{kinds[index]}"), check))
                if order.random() < 0.2:
                    time.sleep(0.001)
            order.shuffle(asked)
            for handle, check in asked:
                check(hvd.synchronize(handle))

    run_horovod(
        size, body, settings=Settings(fusion_bytes=fusion_bytes, cache_capacity=cache_capacity)
    )


@pytest.mark.parametrize("size", [1, 2, 4])
def test_several_threads_on_each_rank(size: int) -> None:
    """Each of a rank's threads has its own names; which of them comes first differs."""

    def body() -> None:
        here, rank = holder(), hvd.rank()
        failures: list[BaseException] = []

        def thread(number: int) -> None:
            hold_here(here)
            try:
                for turn in range(8):
                    start, check = operation((number + turn) % 9, rank, size)
                    check(hvd.synchronize(start(f"{number}.{turn % 3}")))
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=thread, args=(number,)) for number in range(3)]
        for one in threads if rank % 2 else reversed(threads):
            one.start()
        for one in threads:
            one.join()
        if failures:
            raise failures[0]

    run_horovod(size, body)


def test_the_same_number_of_different_tensors() -> None:
    """Ranks count what they ask for each by itself; nobody may take one's third for another's."""

    def body() -> None:
        own, other = ("a", "b") if hvd.rank() == 0 else ("b", "a")
        handles = [hvd.allreduce_async(torch.ones(3), name=name) for name in (own, other)]
        for handle in handles:
            hvd.synchronize(handle)
        with pytest.raises(HorovodInternalError, match=r"rank 0 ended the job: rank . waited more"):
            hvd.allreduce(torch.ones(3), name=own)  # each now waits for something else

    run_horovod(2, body, settings=Settings(stall_shutdown_seconds=2.0))


def test_what_nobody_waits_for_is_done_all_the_same() -> None:
    def body() -> None:
        tensor = torch.full((3,), float(hvd.rank()))
        handle = hvd.allreduce_async_(tensor, op=hvd.Sum)
        if hvd.rank() == 1:
            until(lambda: hvd.poll(handle))
        else:
            engine = current().engine(hvd.global_process_set)
            until(lambda: not engine._works)
        until(lambda: tensor.tolist() == [1.0] * 3)

    run_horovod(2, body)


def test_poll_is_true_only_when_all_have_asked() -> None:
    asked = threading.Event()

    def body() -> None:
        if hvd.rank() == 0:
            handle = hvd.allreduce_async(torch.ones(2), name="x")
            for _ in range(20):
                assert not hvd.poll(handle)
                time.sleep(0.001)
            asked.set()
        else:
            wait_for(asked)
            handle = hvd.allreduce_async(torch.ones(2), name="x")
        until(lambda: hvd.poll(handle))
        assert hvd.synchronize(handle).tolist() == [1.0, 1.0]
        assert hvd.synchronize(handle).tolist() == [1.0, 1.0]  # and once more

    run_horovod(2, body)


def test_who_sleeps_between_rounds_is_woken_by_whoever_has_done_its_work() -> None:
    """Else ranks leave an all-reduce or a barrier some milliseconds after one another."""
    asleep, woken = threading.Event(), threading.Event()

    def body() -> None:
        if hvd.rank() == 1:
            wait_for(asleep)
            hvd.allreduce(torch.ones(2), name="x")
            wait_for(woken)  # when this rank leaves, that wakes everybody
            return
        handle = hvd.allreduce_async(torch.ones(2), name="x")
        changed = current().engine(hvd.global_process_set)._changed
        with changed:
            asleep.set()
            assert changed.wait(PATIENCE_SECONDS / 2)  # not when the time was over
        assert hvd.poll(handle)
        woken.set()

    run_horovod(2, body)


# Errors, after which the job goes on

WRONG: dict[str, Callable[[int], Any]] = {
    "shape": lambda rank: hvd.allreduce(torch.ones(2 + rank // 2), name="x"),
    "dtype": lambda rank: hvd.allreduce(torch.ones(2).to([torch.half, torch.int][rank // 2])),
    "op": lambda rank: hvd.allreduce(torch.ones(2), op=[hvd.Sum, hvd.Max][rank // 2]),
    "prescale": lambda rank: hvd.allreduce(torch.ones(2), prescale_factor=1.0 + rank // 2),
    "postscale": lambda rank: hvd.allreduce(torch.ones(2), postscale_factor=1.0 + rank // 2),
    "number": lambda rank: hvd.grouped_allreduce([torch.ones(2)] * (1 + rank // 2), name="x"),
    "root": lambda rank: hvd.broadcast(torch.ones(2), root_rank=rank // 2),
    "broadcast shape": lambda rank: hvd.broadcast_(torch.ones(2 + rank // 2), root_rank=0),
    "columns": lambda rank: hvd.allgather(torch.ones(2, 1 + rank // 2)),
    "dimensions": lambda rank: hvd.allgather(torch.ones((2,) * (1 + rank // 2))),
    "alltoall columns": lambda rank: hvd.alltoall(torch.ones(4, 1 + rank // 2)),
    "rows": lambda rank: hvd.reducescatter(torch.ones(4 + rank // 2)),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_mismatch_is_told_to_all_and_the_job_goes_on(what: str) -> None:
    def body() -> str:
        try:
            WRONG[what](hvd.rank())
        except HorovodInternalError as error:
            told = str(error)
        assert hvd.allreduce(torch.ones(2), name="x", op=hvd.Sum).tolist() == [4.0, 4.0]
        assert hvd.add_process_set([0, 3]).size() == 2
        return told

    told = run_horovod(4, body)
    assert len(set(told)) == 1
    assert "rank 0 for " in told[0]
    assert "rank 2 for " in told[0]


@pytest.mark.parametrize("culprits", [[0], [1], [0, 1]])
def test_asked_for_again(culprits: list[int]) -> None:
    """The second call raises, at once, where it is made. Nobody else hears of it."""
    refused = {rank: threading.Event() for rank in culprits}

    def body() -> None:
        rank = hvd.rank()
        if rank in culprits:
            handle = hvd.allreduce_async(torch.ones(2), name="x", op=hvd.Sum)
            with pytest.raises(ValueError, match=r"'allreduce.x' was asked for again"):
                hvd.allreduce_async(torch.zeros(3), name="x")
            hvd.broadcast_async(torch.ones(2), 0, name="x")  # another kind is another name
            hvd.grouped_allreduce_async([torch.ones(2)], name="x")  # and so is a group
            refused[rank].set()
        else:
            for event in refused.values():
                wait_for(event)
            handle = hvd.allreduce_async(torch.ones(2), name="x", op=hvd.Sum)
            hvd.grouped_allreduce_async([torch.ones(2)], name="x")
            hvd.broadcast_async(torch.ones(2), 0, name="x")
        assert hvd.synchronize(handle).tolist() == [3.0, 3.0]
        assert hvd.allreduce(torch.ones(2), name="x").tolist() == [1.0, 1.0]

    run_horovod(3, body)


def test_what_nobody_can_compute_ends_on_all_ranks() -> None:
    """A collective that breaks down half-way: no rank is left waiting."""

    def body() -> None:
        if hvd.rank() == 1:
            engine = current().engine(hvd.global_process_set)
            engine._rounds.carry_out = _fail  # type: ignore[method-assign]
        with pytest.raises(HorovodInternalError):
            hvd.allreduce(torch.ones(2), name="x", prescale_factor=2.0)
        with pytest.raises(HorovodInternalError, match=r"Call hvd.shutdown\(\) and hvd.init\(\)"):
            hvd.allreduce(torch.ones(2), name="y")

    run_horovod(2, body, timeout=timedelta(seconds=1))


def _fail(*_: object) -> None:
    raise MemoryError("no room")


# Joining


@pytest.mark.parametrize("size", [1, 2, 4])
def test_join_with_uneven_data(size: int) -> None:
    def body() -> int:
        rank = hvd.rank()
        for turn in range(rank + 1):
            there = size - turn  # ranks that still have data
            total = sum(range(turn, size))
            x = torch.full((3,), float(rank))
            assert hvd.allreduce(x, name="x", op=hvd.Sum).tolist() == [total] * 3
            assert hvd.allreduce(x).tolist() == [total / size] * 3
            assert hvd.allreduce(x - 9, op=hvd.Max).tolist() == [size - 10] * 3
            assert hvd.allreduce(x + 9, op=hvd.Min).tolist() == [turn + 9] * 3
            assert hvd.allreduce(x * 0 + 2, op=hvd.Product).tolist() == [2.0**there] * 3
            pair = hvd.grouped_allreduce([x, x.int()], op=hvd.Sum)
            assert [one.tolist() for one in pair] == [[total] * 3] * 2
            assert hvd.allreduce(x > 0, op=hvd.Min).tolist() == [turn > 0] * 3
        return hvd.join()

    assert run_horovod(size, body) == [size - 1] * size


def test_after_a_join_all_goes_on_as_before() -> None:
    """Also what has no name, of which the ranks have asked for different numbers."""

    def body() -> None:
        for turn in range(3):
            for _ in range(turn + 2 * hvd.rank()):
                hvd.allreduce(torch.ones(2))
            hvd.join()
            assert hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist() == [3.0, 3.0]
            assert hvd.allgather(torch.ones(1)).tolist() == [1.0] * 3

    run_horovod(3, body)


def test_what_needs_every_rank_fails_while_one_has_joined() -> None:
    joined = threading.Event()

    def body() -> None:
        if hvd.rank() == 0:
            engine = current().engine(hvd.global_process_set)
            threading.Thread(target=_when_joined, args=(engine, joined)).start()
            assert hvd.join() == 1
            return
        wait_for(joined)
        with pytest.raises(HorovodInternalError, match="Adasum needs every rank, and rank 0"):
            hvd.allreduce(torch.ones(2), op=hvd.Adasum)
        with pytest.raises(HorovodInternalError, match="barrier needs every rank"):
            hvd.barrier()
        with pytest.raises(HorovodInternalError, match="add_process_set needs every rank"):
            hvd.add_process_set([1])
        hvd.join()

    run_horovod(2, body)


def _when_joined(engine: Any, joined: threading.Event) -> None:
    while not engine._join_is_announced:
        time.sleep(0.001)
    joined.set()


# Leaving


def test_shutdown_while_others_wait() -> None:
    def body() -> None:
        if hvd.rank() == 1:
            hvd.shutdown()
            assert not hvd.is_initialized()
            return
        for _ in range(2):  # whether they waited then or ask later
            with pytest.raises(HorovodInternalError, match=r"rank 1 has called hvd.shutdown\(\)"):
                hvd.allreduce(torch.ones(2), name="x")
        with pytest.raises(HorovodInternalError, match="rank 1 has called"):
            hvd.join()
        hvd.shutdown()
        with pytest.raises(ValueError, match=r"use hvd.init\(\)"):
            hvd.allreduce(torch.ones(2), name="x")

    run_horovod(3, body)


def test_shutdown_by_another_thread_of_this_rank() -> None:
    def body() -> None:
        if hvd.rank() == 0:
            go = hvd.allreduce_async(torch.ones(2), name="y")
            until(lambda: hvd.poll(go))
            with pytest.raises(HorovodInternalError, match=r"rank 1 has called hvd.shutdown\(\)"):
                hvd.synchronize(go)
            return
        here = holder()

        def end() -> None:
            hold_here(here)
            hvd.shutdown()

        handle = hvd.allreduce_async(torch.ones(2), name="x")
        thread = threading.Thread(target=end)
        thread.start()
        with pytest.raises(HorovodInternalError, match=r"'allreduce.x' was not done"):
            hvd.synchronize(handle)
        thread.join()

    run_horovod(2, body)


def test_a_process_set_that_is_removed_leaves_the_others_alone() -> None:
    def body() -> None:
        some = hvd.add_process_set([0, 2])
        if hvd.rank() != 1:
            handle = hvd.allreduce_async(torch.ones(2), name="x", process_set=some, op=hvd.Sum)
            assert hvd.synchronize(handle).tolist() == [2.0, 2.0]
        assert hvd.remove_process_set(some)
        with pytest.raises(UserError):
            hvd.allreduce(torch.ones(2), process_set=some)
        assert hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist() == [3.0, 3.0]

    run_horovod(3, body)


# Stalls


def test_a_stall_is_reported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(LOGGER, "warning", lambda text, *_: told.append(text))

    def body() -> None:
        if hvd.rank() == 2:
            go = hvd.allreduce_async(torch.ones(2), name="early")
            # Asking whether something is done makes this rank come to rounds.
            until(lambda: not hvd.poll(go) and bool(told))
        hvd.allreduce(torch.ones(2), name="late")

    run_horovod(3, body, settings=Settings(stall_warning_seconds=0.2))
    (text,) = told
    assert text.startswith("for more than 0.2 s some ranks have been waiting for others")
    assert "allreduce.late: asked for by ranks 0, 1, missing from rank 2" in text


def test_a_stall_that_lasts_ends_the_job() -> None:
    def body() -> None:
        if hvd.rank() == 2:
            go = hvd.allreduce_async(torch.ones(2), name="early")
            until(lambda: hvd.poll(go))
        with pytest.raises(HorovodInternalError, match=message):
            hvd.allreduce(torch.ones(2), name="late")

    message = "waited more than 0.1 s for rank.* to ask for 'allreduce"
    quick = Settings(stall_warning_seconds=0.0, stall_shutdown_seconds=0.1)
    run_horovod(3, body, settings=quick)


def test_a_rank_that_does_not_come_is_named() -> None:
    """Its thread is stuck, as that of a stopped process: it comes to no round."""
    ended = threading.Event()

    def body() -> None:
        if hvd.rank() == 1:
            with current().engine(hvd.global_process_set)._driving:
                wait_for(ended)
            return
        with pytest.raises(HorovodInternalError, match=r"rank 1 did not answer within 0.3 s"):
            hvd.allreduce(torch.ones(2))
        ended.set()

    run_horovod(2, body, timeout=timedelta(seconds=0.3))
