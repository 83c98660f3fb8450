"""Names workers that hold up the end of a job, and says which have done so for too long.

Once a worker is done, the others should end soon, but rank 0 may go on for hours: it evaluates, or
saves. So what counts is what a worker does meanwhile:

    stopped (SIGSTOP)         named after 3 s, overdue after 10 s: it can never end by itself
    runs, uses no CPU time    named after a minute, overdue after 15 minutes without
    runs                      named after a minute, overdue after a day

`--exit-timeout` replaces the last two limits by one. While nobody is done a stopped worker is only
named, because its peers' own timeouts decide; in a tolerant job nobody waits for it, so that there
it is overdue after a while.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import psutil

from farandole.launch.messages import tell
from farandole.system.process_state import is_stopped

_LOOK_SECONDS = 0.5  # looking takes system calls for each worker
_PAUSE_SECONDS = 5.0  # between two looks: then the launcher was stopped itself
_STOPPED_NAMED_SECONDS = 3.0
_STOPPED_SECONDS = 10.0
_NAMED_SECONDS = 60.0
_IDLE_SECONDS = 15 * 60.0
_DAY_SECONDS = 24 * 3600.0
_IDLE_SHARE = 0.02  # of one core: what threads that only wait use
_IDLE_WINDOW_SECONDS = 10.0


class Location(NamedTuple):
    """A worker's process. `pid` is None on another host, where nobody looks at it."""

    pid: int | None
    host: str

    def __str__(self) -> str:
        return f"on {self.host}" if self.pid is None else f"process {self.pid} on {self.host}"


class Overdue(NamedTuple):
    """A worker that is to be ended, and how it held up the others: `was stopped …`."""

    worker: int
    how: str


@dataclass
class _CpuUse:
    """Since when a process and its children have done nothing to speak of."""

    idle_since: float
    measured: float
    seconds: float = 0.0

    def measure(self, pid: int, now: float) -> None:
        if now - self.measured < _IDLE_WINDOW_SECONDS:
            return
        used = _cpu_seconds(pid)
        if used - self.seconds > _IDLE_SHARE * (now - self.measured):
            self.idle_since = now
        self.measured, self.seconds = now, used


@dataclass
class ExitWatch:
    """Call `look` often. `who` it is that has a number: a rank, or a worker of an elastic job."""

    limit_seconds: float | None = None
    who: str = "rank"
    stopped_seconds: float = math.inf  # while nobody is done
    _looked: float = field(default_factory=time.monotonic)
    _done_since: float | None = None
    _stopped_since: dict[int, float] = field(default_factory=dict)
    _use: dict[int, _CpuUse] = field(default_factory=dict)
    _named: set[tuple[int, str]] = field(default_factory=set)

    def look(self, running: Mapping[int, Location], done: int | None) -> list[Overdue]:
        """Who is overdue. `done` is a worker that has ended with 0, if one has."""
        now = time.monotonic()
        pause = now - self._looked
        if pause < _LOOK_SECONDS:
            return []
        self._looked = now
        if pause > _PAUSE_SECONDS:  # nobody's fault but ours
            self._stopped_since.clear()
            self._done_since = None
        if done is None:
            self._done_since = None
        elif self._done_since is None:
            self._done_since = now
        found = []
        for worker, location in running.items():
            how = self._stopped(worker, location, done, now) or self._running(
                worker, location, done, now
            )
            if how is not None:
                found.append(Overdue(worker, how))
        return found

    def _stopped(self, worker: int, location: Location, done: int | None, now: float) -> str | None:
        if location.pid is None or not is_stopped(location.pid):
            self._stopped_since.pop(worker, None)
            self._named.discard((worker, "stopped"))
            return None
        since = now - self._stopped_since.setdefault(worker, now)
        limit = self.stopped_seconds if done is None else _STOPPED_SECONDS
        if since >= limit:
            after = "" if done is None else f" after {self.who} {done} was done"
            return f"was stopped (SIGSTOP) for {since:.0f} s{after}"
        if since >= _STOPPED_NAMED_SECONDS:
            rest = f"; it is ended when it has been so for {limit:g} s" if limit < math.inf else ""
            self._name(
                worker,
                "stopped",
                f"{self.who} {worker} ({location}) is stopped (SIGSTOP); "
                f"`kill -CONT {location.pid}` lets it go on{rest}",
            )
        return None

    def _running(self, worker: int, location: Location, done: int | None, now: float) -> str | None:
        if self._done_since is None or worker in self._stopped_since:
            return None
        since, limit = now - self._done_since, self.limit_seconds
        after = f"{self.who} {done} was done"
        # Measured from the moment when the first worker was done: what a worker computed before
        # that says nothing about its end.
        use = self._use.setdefault(worker, _CpuUse(self._done_since, self._done_since))
        if location.pid is not None:
            use.measure(location.pid, now)
        idle = 0.0 if location.pid is None else now - max(use.idle_since, self._done_since)
        if limit is None and idle >= _IDLE_SECONDS:
            return f"still ran {since:.0f} s after {after}, the last {idle:.0f} s of them idle"
        if since >= (_DAY_SECONDS if limit is None else limit):
            return f"still ran {since:.0f} s after {after}"
        if since >= _NAMED_SECONDS:
            rest = "15 minutes of doing nothing, or a day" if limit is None else f"{limit:g} s"
            self._name(
                worker,
                "running",
                f"waiting for {self.who} {worker} ({location}, running), {since:.0f} s after "
                f"{after}; it is ended after {rest} (--exit-timeout)",
            )
        return None

    def _name(self, worker: int, what: str, line: str) -> None:
        if (worker, what) not in self._named:
            self._named.add((worker, what))
            tell(line)


def _cpu_seconds(pid: int) -> float:
    """Of a process and of those that it has started, such as data loaders; ended ones too."""
    total = 0.0
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        for each in (process, *process.children(recursive=True)):
            with contextlib.suppress(psutil.Error):  # it has ended meanwhile
                total += sum(each.cpu_times()[:4])  # user, system, and those of ended children
    return total
