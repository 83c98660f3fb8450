"""Ends workers: asks first, and kills those that have not ended when their time is over."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from farandole.launch.backends.base import Worker
from farandole.launch.messages import tell
from farandole.system.process_state import is_stopped
from farandole.worker.grace import Grace

_POLL_SECONDS = 0.05
_KILLED_SECONDS = 5.0


def stop_workers(workers: Iterable[Worker], seconds: float, received: Sequence[str] = ()) -> None:
    """Returns when all have ended. They have `seconds`, or less if one more signal is `received`.

    A suspended process (SIGSTOP) would not hear of it, and has nothing to save: it is killed at
    once. One that the system itself holds (state D) is named, and not waited for.
    """
    running = _running(workers)
    for worker in running:
        worker.stop()
    grace = Grace(seconds, received)
    while running and not grace.is_over():
        for worker in running:
            # In the loop, not once: somebody may suspend a worker while it saves.
            if worker.pid is not None and is_stopped(worker.pid):
                worker.kill()
        time.sleep(_POLL_SECONDS)
        running = _running(running)
    # An agent on another host gives its worker the same grace, and reports only after that.
    margin = max((worker.stop_margin_seconds for worker in running), default=0.0)
    grace = Grace(seconds + margin, received)
    while margin and running and not grace.is_over():
        time.sleep(_POLL_SECONDS)
        running = _running(running)
    _kill(running)


def _kill(workers: Sequence[Worker]) -> None:
    for worker in workers:
        worker.kill()
    # Not those of other hosts: their connection is given up, and their agents end them.
    running = [worker for worker in _running(workers) if worker.pid is not None]
    deadline = time.monotonic() + _KILLED_SECONDS
    while running and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
        running = _running(running)
    for worker in running:
        tell(
            f"process {worker.pid} does not end, {_KILLED_SECONDS:g} s after SIGKILL: a device or "
            "a network file system holds it"
        )


def _running(workers: Iterable[Worker]) -> list[Worker]:
    return [worker for worker in workers if worker.poll() is None]
