"""Collectives in the background: one thread, in the order they were started."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Generic, TypeVar

import torch
from torch.futures import Future

from farandole.comm.helper import start_helper
from farandole.comm.meter import Meter
from farandole.comm.streams import Ready, SideStreams, as_here, tensors_in

T = TypeVar("T")


class Handle(Generic[T]):
    """A collective under way. `wait` returns its result, or raises what went wrong in it."""

    def __init__(self, meter: Meter) -> None:
        # With devices, whoever waits for the future waits on the GPU's streams too.
        on_gpu = torch.cuda.is_initialized()
        self.future: Future[T] = Future(devices=[torch.cuda.current_device()] if on_gpu else None)
        """For PyTorch's own machinery, such as a DDP communication hook."""
        self._ready: Ready | None = None
        self._work_and_its_tensors: object = None
        self._meter = meter
        self._ended = threading.Event()

    def done(self) -> bool:
        return self._ended.is_set()

    def wait(self) -> T:
        """Ends within the group's timeout: the collective itself does."""
        with self._meter.waiting():
            return self._result()

    def _result(self) -> T:
        self._ended.wait()
        result = self.future.wait()
        if self._ready is not None:
            self._ready.wait()
        self._work_and_its_tensors = None
        return result

    def _work(self, work: Callable[[], T]) -> None:
        """On the stream that is current: the result is there when this point of it is reached."""
        result = work()
        self._ready = Ready(tensors_in(result))
        self.future.set_result(result)

    def _run(self, placed: Callable[[], None]) -> None:
        """`placed` calls `_work` on a stream. Whatever it raises, whoever waits hears of it, and
        the thread goes on to what is next: a GPU that has failed may say so at any call."""
        try:
            placed()
        except BaseException as error:
            if not self.future.done():
                self.future.set_exception(_as_exception(error))  # type: ignore[arg-type]
        finally:
            self._ended.set()


def _as_exception(error: BaseException) -> Exception:
    """A future takes no other kind, such as what ends a thread."""
    if isinstance(error, Exception):
        return error
    wrapped = RuntimeError(f"a collective in the background was ended by {error!r}")
    wrapped.__cause__ = error
    return wrapped


class _Row:
    """What waits for its turn. The thread that serves it knows nothing else, so that it does not
    keep the queue alive, and ends with it."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.waiting: deque[Callable[[], None]] = deque()
        self.busy = False
        self.abandoned = False

    @property
    def is_over(self) -> bool:
        # In this order, for who asks without the lock: work is marked as busy before it leaves.
        return not self.waiting and not self.busy

    def abandon(self) -> None:
        """What waits already is still done."""
        with self.changed:
            self.abandoned = True
            self.changed.notify_all()

    def serve(self) -> None:
        while True:
            with self.changed:
                self.busy = False
                self.changed.notify_all()  # somebody may wait for the end
                self.changed.wait_for(lambda: bool(self.waiting) or self.abandoned)
                if not self.waiting:
                    return
                self.busy = True
                work = self.waiting.popleft()
            work()
            del work  # it may hold the last reference to a tensor


class Queue:
    """Runs what it is given one after the other; `meter` counts the time that others wait for it.

    Time in which a collective runs behind the caller's back is not waited for.
    """

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._row = _Row()
        self._thread: threading.Thread | None = None
        self._side_streams = SideStreams()

    def start(self, work: Callable[[], T]) -> Handle[T]:
        """Puts `work` behind everything started before it and returns at once. On a GPU it runs
        beside what the caller queues from now on."""
        return self._start(work, self._side_streams.apart)

    def _start(
        self, work: Callable[[], T], on: Callable[[Callable[[], None]], Callable[[], None]]
    ) -> Handle[T]:
        handle: Handle[T] = Handle(self._meter)
        # A GPU may use what the work was given long after the host has queued it.
        handle._work_and_its_tensors = work
        placed = partial(handle._run, on(lambda: handle._work(work)))
        row = self._row
        with row.changed:
            if self._thread is None:
                self._thread = start_helper(row.serve, "comm")
                weakref.finalize(self, row.abandon).atexit = False
            row.waiting.append(placed)
            row.changed.notify_all()
        return handle

    @property
    def idle(self) -> bool:
        """Whether nothing is under way. Only the thread that starts work can rely on it."""
        return self._row.is_over

    def settle(self, seconds: float) -> None:
        """Waits until nothing is under way, but no longer than so many seconds."""
        row = self._row
        with row.changed:
            row.changed.wait_for(lambda: row.is_over, seconds)

    def in_order(self, work: Callable[[], T]) -> T:
        """Runs `work` after everything started before it: here and now when nothing is."""
        if self._has_its_turn():
            return work()
        begun = self._meter.begin_wait()
        try:
            return self.unmetered(work)
        finally:
            self._meter.end_wait(begun)

    def unmetered(self, work: Callable[[], T]) -> T:
        """The same, for callers who count the waiting themselves."""
        activity, row = self._meter.activity, self._row
        activity.begin_wait()
        try:
            # To hand work to the thread and back takes two switches, longer than a small
            # collective. The order holds: nothing is under way, and only this thread could start
            # something.
            if not row.waiting and not row.busy:  # as `idle`: this runs in every collective
                return work()
            if self._has_its_turn():
                return work()
            return self._start(work, as_here)._result()
        finally:
            activity.end_wait()

    def _has_its_turn(self) -> bool:
        """Work that runs in the queue's thread and calls a collective has its turn already. To
        queue it behind itself would block for ever."""
        return self._thread is not None and threading.current_thread() is self._thread
