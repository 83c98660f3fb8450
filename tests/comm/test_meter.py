"""What a meter counts: blocking waits, the tail of a backward pass, and bytes of a ring."""

from __future__ import annotations

import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from farandole.comm.meter import GradientWait, Meter, ring_bytes
from farandole.comm.queue import Queue


class Clock:
    """Stands in for `time.perf_counter`."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    fake = Clock()
    monkeypatch.setattr("farandole.comm.meter.time.perf_counter", fake)
    return fake


@given(count=st.integers(0, 10**9), size=st.integers(1, 4096))
def test_ring_bytes(count: int, size: int) -> None:
    """Each rank sends every chunk but one, twice: 2(p−1)/p of the bytes."""
    exact = 2 * (size - 1) * count / size
    assert ring_bytes(count, size) == pytest.approx(exact, rel=1e-9, abs=1)
    assert ring_bytes(count, 1) == 0
    assert ring_bytes(count * size, size) == 2 * (size - 1) * count


def test_a_wait_counts_even_when_the_collective_fails(clock: Clock) -> None:
    meter = Meter()

    def fails() -> None:
        with meter.waiting():
            clock.now += 2.5
            raise RuntimeError("peer gone")

    with pytest.raises(RuntimeError, match="peer gone"):
        fails()
    assert meter.waited_seconds == 2.5


def test_a_wait_inside_of_another_counts_once(clock: Clock) -> None:
    meter = Meter()
    queue = Queue(meter)

    def collective() -> None:
        clock.now += 2.0

    with meter.waiting():
        clock.now += 1.0
        queue.in_order(collective)
    assert meter.waited_seconds == 3.0
    with meter.counted_elsewhere():
        queue.in_order(collective)
    assert meter.waited_seconds == 3.0
    queue.in_order(collective)
    assert meter.waited_seconds == 5.0
    other = threading.Thread(target=queue.in_order, args=[collective])
    with meter.counted_elsewhere():  # in this thread only
        other.start()
        other.join()
    assert meter.waited_seconds == 7.0


def test_only_what_follows_the_last_bucket_is_waiting(clock: Clock) -> None:
    meter = Meter()
    wait = GradientWait(meter)
    bucket = torch.zeros(1)
    wait.begin(bucket, is_last=False)
    clock.now += 1.0
    wait.end()  # while later gradients are being computed: free
    wait.begin(bucket, is_last=False)
    clock.now += 1.0
    wait.begin(bucket, is_last=True)  # the backward pass has no more work of its own
    clock.now += 0.25
    wait.end()
    clock.now += 0.5
    wait.end()
    assert meter.waited_seconds == pytest.approx(0.75)


def test_each_backward_pass_counts_afresh(clock: Clock) -> None:
    meter = Meter()
    wait = GradientWait(meter)
    for _ in range(3):
        wait.begin(torch.zeros(1), is_last=True)
        clock.now += 0.1
        wait.end()
        clock.now += 7.0
    assert meter.waited_seconds == pytest.approx(0.3)


def test_a_resumed_run_goes_on_counting() -> None:
    meter = Meter()
    meter.add_wait(1.0)
    meter.add_bytes(10)
    meter.go_on_from(waited_seconds=40.0, bytes_sent=500)
    meter.add_wait(1.5)
    meter.add_bytes(5)
    assert (meter.waited_seconds, meter.bytes_sent) == (41.5, 505)
