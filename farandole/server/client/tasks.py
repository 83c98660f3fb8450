"""Asynchronous tasks with explicit dependencies, and a bound on how far they may run ahead.

A worker hands in tasks one after the other: a push, a get, or anything else that is under way once
it is started. A task starts when those that it names have ended, and when of the tasks before it at
most the last `delay` have not: with a delay of 0 they run one after the other (sequential), with no
bound only the named dependencies count (eventual), and in between lies bounded delay.

    tasks = Tasks(delay=4)
    pushed = tasks.submit(lambda: store.start_push("w", gradient))
    fresh = tasks.submit(lambda: store.start_get("w"), after=[pushed])
    weights = tasks.wait(fresh)

What one worker's tasks may see of the others' is the servers' affair: see `Store.get(staleness=…)`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

from farandole.errors import UserError


class UnderWay(Protocol):
    """What a task is once it has started, such as a `Pending` of a store."""

    def done(self) -> bool: ...

    def wait(self) -> Any: ...


class Tasks:
    """For one thread. `delay` of None: no bound."""

    def __init__(self, delay: int | None = None) -> None:
        if delay is not None and delay < 0:
            raise UserError(f"a delay of {delay} tasks cannot be; 0 is one after the other.")
        self._delay = delay
        self._count = 0
        self._waiting: dict[int, tuple[Callable[[], UnderWay], frozenset[int]]] = {}
        self._started: dict[int, UnderWay] = {}
        self._results: dict[int, Any] = {}  # of tasks that have ended

    def submit(self, start: Callable[[], UnderWay], after: Iterable[int] = ()) -> int:
        """Hands in a task; returns its number. It starts at once if it may, else as soon as it may
        and somebody waits for or hands in another."""
        number = self._count
        needed = frozenset(after)
        unknown = sorted(other for other in needed if not 0 <= other < number)
        if unknown:
            raise UserError(f"task {number} cannot come after {unknown}: they are not before it.")
        self._count += 1
        self._waiting[number] = (start, needed)
        self._progress()
        return number

    def done(self, number: int) -> bool:
        self._progress()
        return number in self._results

    def wait(self, number: int) -> Any:
        """The result of a task, when it has ended; raises what went wrong in it or before it."""
        if not 0 <= number < self._count:
            raise UserError(f"there is no task {number}; {self._count} were handed in.")
        self._progress()
        while number not in self._results:
            self._end(min(self._started))  # somebody is: the first that waits could always start
            self._progress()
        return self._results[number]

    def wait_all(self) -> None:
        while self._started or self._waiting:
            self._progress()
            if self._started:
                self._end(min(self._started))

    @property
    def unfinished(self) -> list[int]:
        return sorted([*self._waiting, *self._started])

    def _progress(self) -> None:
        """Takes note of what has ended, and starts what may start."""
        for number in [number for number, task in self._started.items() if task.done()]:
            self._end(number)
        for number in list(self._waiting):
            if self._may_start(number):
                start, _ = self._waiting.pop(number)
                self._started[number] = start()

    def _may_start(self, number: int) -> bool:
        _, needed = self._waiting[number]
        if not needed <= self._results.keys():
            return False
        if self._delay is None:
            return True
        # Tasks that wait count as well as those that run. So task n never starts before task n -
        # delay - 1 has ended, whatever the tasks between them wait for.
        oldest = min([*self._waiting, *self._started])
        return oldest >= number - self._delay

    def _end(self, number: int) -> None:
        self._results[number] = self._started.pop(number).wait()
