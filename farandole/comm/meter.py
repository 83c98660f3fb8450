"""What communication cost this rank: seconds spent waiting and bytes put on the wire."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType

import torch

from farandole.system.activity import NO_ACTIVITY, Activity
from farandole.trace.spans import NO_TRACE, Trace


class Meter:
    """Counts for one rank. Safe to use from the threads that complete collectives.

    A wait inside of another one is part of it: a stage that waits for a message waits in a
    collective, and that time passes once.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Threads inside of a wait that is counted whole. Each adds and removes only itself, so no
        # lock is needed; and `threading.local` takes twice as long.
        self._inside: set[int] = set()
        self._waited_seconds = 0.0
        self._bytes_sent = 0
        self.activity: Activity = NO_ACTIVITY  # hears of waits
        self._device_spans: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()

    @property
    def waited_seconds(self) -> float:
        self._settle()
        return self._waited_seconds

    @property
    def bytes_sent(self) -> int:
        return self._bytes_sent

    def add_wait(self, seconds: float) -> None:
        with self._lock:
            self._waited_seconds += max(0.0, seconds)

    def add_device_wait(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> None:
        """A wait on the GPU's own clock; read later, so that measuring never stalls the stream."""
        with self._lock:
            self._device_spans.append((begin, end))

    def add_bytes(self, count: int) -> None:
        with self._lock:
            self._bytes_sent += count

    def go_on_from(self, waited_seconds: float, bytes_sent: int) -> None:
        """Sets the counts to those of a run that is resumed here."""
        self._settle()
        with self._lock:
            self._waited_seconds, self._bytes_sent = waited_seconds, bytes_sent

    def begin_wait(self) -> float | None:
        """A wait of this thread begins. Returns what `end_wait` wants."""
        thread = threading.get_ident()
        if thread in self._inside:
            return None
        self._inside.add(thread)
        return time.perf_counter()

    def end_wait(self, begun: float | None) -> None:
        if begun is not None:
            seconds = time.perf_counter() - begun
            self._inside.discard(threading.get_ident())
            with self._lock:
                self._waited_seconds += seconds

    def add_call(self, begun: float, bytes_sent: int) -> None:
        """A wait since then, in which no other can have begun, and what was sent in it."""
        seconds = time.perf_counter() - begun
        if self._inside and threading.get_ident() in self._inside:
            seconds = 0.0
        with self._lock:
            self._waited_seconds += seconds
            self._bytes_sent += bytes_sent

    def waiting(self) -> AbstractContextManager[None]:
        """Counts the time spent inside as waiting: for blocking collectives."""
        return _Waiting(self)

    @contextmanager
    def counted_elsewhere(self) -> Iterator[None]:
        """Inside, no wait of this thread is counted: the caller counts it as a part of its own."""
        thread = threading.get_ident()
        was_inside = thread in self._inside
        self._inside.add(thread)
        try:
            yield
        finally:
            if not was_inside:
                self._inside.discard(thread)

    def _settle(self) -> None:
        """Reads the device spans that have ended; an unfinished one stays for the next time."""
        with self._lock:
            while self._device_spans and self._device_spans[0][1].query():
                begin, end = self._device_spans.popleft()
                self._waited_seconds += max(0.0, begin.elapsed_time(end) / 1000)


class _Waiting:
    """A class, for a generator would take longer than many a message."""

    __slots__ = ("_begun", "_meter")

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._begun: float | None = None

    def __enter__(self) -> None:
        self._begun = self._meter.begin_wait()
        self._meter.activity.begin_wait()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._meter.activity.end_wait()
        self._meter.end_wait(self._begun)


def ring_bytes(count: int, size: int) -> int:
    """Bytes each rank sends when `count` bytes are all-reduced by a ring, as gloo and NCCL do."""
    return 2 * (size - 1) * count // size


class GradientWait:
    """How long a backward pass waited for its gradients, given the buckets' begin and end.

    A bucket's all-reduce that ends while later gradients are still being computed cost nothing.
    What is waited for is the stretch from the moment the last bucket was ready (the backward's
    own work is then done) to the moment the last all-reduce has ended. A trace shows both: each
    bucket's time from ready to reduced, and that stretch.
    """

    def __init__(self, meter: Meter, trace: Trace = NO_TRACE) -> None:
        self._meter = meter
        self._spans = _BucketSpans(trace) if trace is not NO_TRACE else None
        self._lock = threading.Lock()
        self._under_way = 0
        self._last_ready = 0.0
        self._last_issued = False
        self._ready_event: torch.cuda.Event | None = None

    def begin(self, buffer: torch.Tensor, is_last: bool) -> None:
        with self._lock:
            if self._spans is not None:
                self._spans.begin(buffer, is_last)
            self._under_way += 1
            self._last_issued = is_last
            if buffer.is_cuda:
                if is_last:
                    self._ready_event = torch.cuda.Event(enable_timing=True)
                    self._ready_event.record()
            else:
                self._last_ready = time.perf_counter()

    def end(self) -> None:
        with self._lock:
            self._under_way -= 1
            if self._spans is not None:
                self._spans.end(all_ended=not self._under_way)
            # Between two buckets nothing may be under way while the backward pass still computes.
            # Only after the last bucket was handed over is an empty list the end.
            if self._under_way or not self._last_issued:
                return
            ready, self._ready_event = self._ready_event, None
            if ready is None:
                self._meter.add_wait(time.perf_counter() - self._last_ready)
            else:
                done = torch.cuda.Event(enable_timing=True)
                done.record()
                self._meter.add_device_wait(ready, done)


class _BucketSpans:
    """Buckets are reduced in the order in which they became ready, so the first in is first out."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._number = 0
        self._buckets: deque[AbstractContextManager[None]] = deque()
        self._wait: AbstractContextManager[None] | None = None

    def begin(self, buffer: torch.Tensor, is_last: bool) -> None:
        span = self._trace.span(f"bucket {self._number}", "gradients", bytes=buffer.nbytes)
        span.__enter__()
        self._buckets.append(span)
        self._number = 0 if is_last else self._number + 1
        # On a GPU the wait is the GPU's, and nothing that this process could see.
        if is_last and not buffer.is_cuda:
            self._wait = self._trace.span("waiting for gradients", "wait")
            self._wait.__enter__()

    def end(self, all_ended: bool) -> None:
        self._buckets.popleft().__exit__(None, None, None)
        if all_ended and self._wait is not None:
            self._wait.__exit__(None, None, None)
            self._wait = None
