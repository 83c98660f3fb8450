"""Collectives in the background: order, failures, and what is held on to."""

from __future__ import annotations

import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from farandole.comm.meter import Meter
from farandole.comm.queue import Handle, Queue


@settings(max_examples=30, deadline=None)
@given(st.lists(st.booleans(), max_size=30))
def test_what_is_started_and_what_is_called_run_in_one_order(directly: list[bool]) -> None:
    queue, seen = Queue(Meter()), list[int]()
    handles: list[Handle[None]] = []
    for number, direct in enumerate(directly):
        if direct:
            queue.in_order(lambda number=number: seen.append(number))
            assert all(handle.done() for handle in handles)
        else:
            handles.append(queue.start(lambda number=number: seen.append(number)))
    for handle in handles:
        handle.wait()
    assert seen == list(range(len(directly)))


def test_start_returns_before_the_work_is_done() -> None:
    queue, go = Queue(Meter()), threading.Event()
    first = queue.start(lambda: go.wait(10))
    second = queue.start(threading.current_thread)
    assert not first.done()
    assert not second.done()
    assert not queue.idle
    go.set()
    assert first.wait() is True
    assert second.wait() is not threading.current_thread()
    assert first.done()
    assert second.done()


def test_without_anything_under_way_the_caller_s_thread_does_it() -> None:
    assert Queue(Meter()).in_order(threading.current_thread) is threading.current_thread()


def test_work_may_call_what_waits_for_the_queue() -> None:
    """A collective that is made of others, run in the background."""
    queue = Queue(Meter())
    assert queue.start(lambda: queue.in_order(lambda: queue.in_order(lambda: 7))).wait() == 7
    assert queue.start(lambda: queue.unmetered(lambda: queue.unmetered(lambda: 8))).wait() == 8


def test_a_failure_is_raised_by_wait_every_time_and_the_queue_goes_on() -> None:
    queue = Queue(Meter())

    def fail() -> None:
        raise KeyError("lost")

    failed, after = queue.start(fail), queue.start(lambda: 1)
    for _ in range(2):
        with pytest.raises(KeyError, match="lost"):
            failed.wait()
    assert failed.done()
    assert after.wait() == 1
    go = threading.Event()
    queue.start(lambda: go.wait(10))
    threading.Timer(0.01, go.set).start()
    with pytest.raises(KeyError, match="lost"):
        queue.in_order(fail)  # behind what is under way


def test_errors_around_the_work_are_raised_by_wait_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that has failed says so at the next call of CUDA, whichever that is."""

    def fail(*_: object) -> None:
        raise RuntimeError("CUDA error: device-side assert triggered")

    queue = Queue(Meter())
    monkeypatch.setattr("farandole.comm.queue.Ready", fail)
    behind = queue.start(lambda: 1)
    with pytest.raises(RuntimeError, match="device-side"):
        behind.wait()
    monkeypatch.undo()
    monkeypatch.setattr(queue._side_streams, "apart", lambda work: fail)
    before = queue.start(lambda: 1)
    with pytest.raises(RuntimeError, match="device-side"):
        before.wait()
    monkeypatch.undo()
    assert queue.start(lambda: 2).wait() == 2  # the thread lives
    assert queue.in_order(lambda: 3) == 3


def test_what_the_work_was_given_stays_until_it_is_waited_for() -> None:
    """The memory of a tensor must not be given away while a GPU may still read it."""
    queue = Queue(Meter())
    tensor = torch.zeros(3)
    seen = weakref.ref(tensor)
    handle = queue.start(lambda held=tensor: len(held))
    queue.start(lambda: None).wait()  # so that the thread is past it
    del tensor
    gc.collect()
    assert seen() is not None
    handle.wait()
    gc.collect()
    assert seen() is None


def test_a_result_is_let_go_with_its_handle() -> None:
    queue = Queue(Meter())
    tensor = torch.zeros(3)
    seen = weakref.ref(tensor)
    handle = queue.start(lambda held=tensor: held)
    handle.wait()
    queue.start(lambda: None).wait()  # so that the thread is past it
    del tensor, handle
    gc.collect()
    assert seen() is None


def test_the_thread_ends_with_the_queue_and_not_before_its_work() -> None:
    queue, go = Queue(Meter()), threading.Event()
    first, last = queue.start(go.wait), queue.start(threading.current_thread)
    del queue
    gc.collect()
    go.set()
    assert first.wait()
    thread = last.wait()
    assert thread.name == "comm"
    thread.join(30)
    assert not thread.is_alive()


def test_only_those_who_wait_are_metered() -> None:
    meter = Meter()
    queue, go = Queue(meter), threading.Event()
    handle = queue.start(lambda: go.wait(10))
    assert meter.waited_seconds == 0
    threading.Timer(0.05, go.set).start()
    handle.wait()
    assert meter.waited_seconds > 0.01


def test_what_runs_in_the_background_has_no_team_of_threads() -> None:
    """It would fight with the computation for the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        queue = Queue(Meter())
        assert queue.start(torch.get_num_threads).wait() == 1
        assert torch.get_num_threads() == 3
        with ThreadPoolExecutor(1) as other:
            assert other.submit(torch.get_num_threads).result() == 3
    finally:
        torch.set_num_threads(before)


def test_a_queue_can_be_waited_for_but_not_for_ever() -> None:
    queue, go = Queue(Meter()), threading.Event()
    queue.settle(60)  # nothing is under way
    handle = queue.start(go.wait)
    queue.settle(0.01)
    assert not handle.done()
    go.set()
    queue.settle(60)
    assert handle.done()


def test_what_would_end_a_thread_is_raised_where_it_is_waited_for() -> None:
    def leave() -> None:
        raise SystemExit(3)

    queue = Queue(Meter())
    handle = queue.start(leave)
    with pytest.raises(RuntimeError, match=r"was ended by SystemExit\(3\)"):
        handle.wait()
    assert queue.start(lambda: 5).wait() == 5, "the thread goes on"
