"""What `pool=` may be. Without ranks nothing here imports torch."""

from __future__ import annotations

import sys
from concurrent.futures import Executor
from typing import Any

from farandole.learn.pools.base import Pool
from farandole.learn.pools.executor import OnExecutor, Processes
from farandole.learn.pools.here import Here


def as_pool(pool: Any) -> Pool:
    """Raises `TypeError` for what is none."""
    if pool is None:
        return Here()
    if isinstance(pool, Pool):
        return pool
    if isinstance(pool, int) and not isinstance(pool, bool):
        return Processes(pool)
    if isinstance(pool, Executor):
        return OnExecutor(pool, _workers_of(pool))
    if "farandole.comm" in sys.modules:  # else nobody has a group
        from farandole.comm import Group
        from farandole.learn.pools.ranks import Ranks

        group = getattr(pool, "group", pool)
        if isinstance(group, Group):
            return Ranks(group)
    raise TypeError(
        f"pool={pool!r} is no pool. Give None (threads of this process), a number of processes, an "
        "executor of concurrent.futures (also mpi4py.futures), or inside `farandole run` the run."
    )


def _workers_of(executor: Executor) -> int:
    """As many as it says. Only the number of tasks depends on it, not their results."""
    for name in ("_max_workers", "num_workers"):
        found = getattr(executor, name, None)
        if isinstance(found, int) and found > 0:
            return found
    return 8
