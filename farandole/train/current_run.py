"""`fd.current`: the run, for functions that nobody hands it to.

A process has one run, the one that `fd.init` made, whichever of its threads asks. In the in-process
world of `farandole.testing` ranks are threads, so there each thread has its own, which comes first.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

from farandole.errors import UserError

if TYPE_CHECKING:
    from farandole.train.run import Run


class _Runs:
    def __init__(self) -> None:
        self.of_thread: ContextVar[Run | None] = ContextVar("run of this thread", default=None)
        self.of_process: Run | None = None
        self.process = -1  # which made it: a child that was forked has a copy


_RUNS = _Runs()


def current() -> Run:
    """The run of this process, which `fd.init()` made.

    Raises `UserError` where there is none: before `fd.init`, and in processes that this one has
    started, such as those of a DataLoader, which have no rank.
    """
    run = _RUNS.of_thread.get()
    if run is not None:
        return run
    if _RUNS.of_process is None:
        raise UserError("there is no run yet: call fd.init() at the start of the script.")
    if _RUNS.process != os.getpid():
        raise UserError(
            f"process {os.getpid()} was started by a rank, process {_RUNS.process}, and is none "
            "itself. Give it what it needs, such as run.rank, when it is started."
        )
    return _RUNS.of_process


def make_current(run: Run) -> None:
    """For this process, from now on."""
    _RUNS.of_process, _RUNS.process = run, os.getpid()


@contextmanager
def current_in_thread(run: Run) -> Iterator[None]:
    """For this thread, inside."""
    token = _RUNS.of_thread.set(run)
    try:
        yield
    finally:
        _RUNS.of_thread.reset(token)
