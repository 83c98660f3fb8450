"""Runs a job to its end: the one loop, whatever the policy and wherever the workers are.

    launcher                                           workers
    ┌─────────────────────────────┐                    ┌──────────────────┐
    │ `supervise`                 │  backend: start,   │ python script.py │ × n
    │   policy: what to do        │  stop, kill        │   fd.init()      │
    │   pool: who runs            │ ─────────────────▶ │                  │
    │ store                       │ ◀───────────────── │                  │
    │ prefixes and prints output  │  log files         └──────────────────┘
    └─────────────────────────────┘

A job ends when its policy says so, or when the launcher is told to stop (Ctrl-C, SIGTERM). In every
case, also after an exception, no process is left.
"""

from __future__ import annotations

import time
from dataclasses import replace

from farandole.launch.job import LostResourceError, Outcome
from farandole.launch.policies.base import Policy
from farandole.launch.worker_pool import WorkerPool
from farandole.worker.signals import signals_noted, warnings_passed_on

_POLL_SECONDS = 0.05


def supervise(pool: WorkerPool, policy: Policy) -> Outcome:
    """Runs the job of `pool` to its end and says how it went. Closes the pool."""
    kept = False
    with signals_noted() as received, warnings_passed_on(pool.send):
        try:
            pool.open(received)
            policy.start()
            while not policy.is_finished() and not received:
                time.sleep(_POLL_SECONDS)
                step(pool, policy)
            # A job that was over when the signal came has ended by itself.
            stopped_by = None if policy.is_finished() else received[0]
            if stopped_by is None:
                policy.settle()
            else:
                pool.announce_grace(stopped_by)
            # Stopped before the outcome is made: the exit codes of all workers belong to it. The
            # `finally` below does it again for the case of an exception, and finds nothing to do
            # otherwise.
            pool.stop(received)
            outcome = replace(
                policy.outcome(stopped_by),
                joined=pool.has_joined(),
                report=pool.report(),
                received=received[0] if received else None,
            )
            if outcome.stopped_by == "SIGINT":
                pool.mark_interrupted()
            kept = outcome.stopped_by is None and bool(outcome.failure or outcome.lost)
        except LostResourceError as error:
            error.report = pool.report()
            raise
        finally:
            pool.stop(received)
            pool.close(keep_logs=kept)
    return replace(outcome, logs=pool.directory.folder if kept else None)


def step(pool: WorkerPool, policy: Policy) -> None:
    """Tells the policy what has happened since the last step, and lets it act."""
    ended = pool.collect()
    if ended:
        policy.on_exits(ended)
    if policy.is_finished():
        return
    pool.check()
    # Ends are taken in before anyone is called overdue, so that a worker that has just ended is not
    # named.
    overdue = [*policy.exit_watch.look(pool.locations(), policy.done), *pool.stalled()]
    if overdue:
        # A worker may be overdue in both ways; the last word holds.
        policy.on_overdue(list({each.worker: each for each in overdue}.values()))
    if not policy.is_finished():
        policy.tick()
