"""Horovod's ranks as threads of one process: each calls `hvd` as if it were alone in its own."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

from farandole.comm import Exchange, Group, InProcess
from farandole.horovod.session import Holder, Session, hold_here
from farandole.horovod.settings import Settings
from farandole.topology import Topology
from farandole.worker.environment import RankAssignment

T = TypeVar("T")


def run_horovod(
    size: int,
    body: Callable[[], T],
    *,
    timeout: timedelta = timedelta(seconds=120),
    topology: Topology | None = None,
    settings: Settings | None = None,
) -> list[T]:
    """Calls `body()` on each of `size` ranks at once; returns what each returned, by rank.

    `hvd.init()` has been called for them. Raises the exception of the rank that failed first; the
    others are woken from their waits. The random state of torch is shared by all threads.
    """
    exchange = Exchange(size, timeout)
    where = topology or Topology.single(size)
    results: dict[int, T] = {}
    failures: list[BaseException] = []

    def work(rank: int) -> None:
        own = Holder()
        hold_here(own)
        try:
            group = Group(InProcess(exchange, rank, where))
            assignment = RankAssignment(
                "alone", rank, size, where.local_rank(rank), where.local_size(rank)
            )
            own.start(
                Session(assignment, group, where, settings or Settings.from_environ(os.environ))
            )
            results[rank] = body()
        except BaseException as error:
            failures.append(error)
            exchange.fail(rank, f"failed: {type(error).__name__}: {error}")
        finally:
            own.end()
            hold_here(None)

    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return [results[rank] for rank in range(size)]
