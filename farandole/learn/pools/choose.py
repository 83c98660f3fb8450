"""What `pool=` may be. Without ranks nothing here imports torch."""

from __future__ import annotations

import sys
from concurrent.futures import Executor
from typing import Any

from farandole.errors import UserError
from farandole.learn.pools.base import Pool
from farandole.learn.pools.executor import OnExecutor
from farandole.learn.pools.here import Here
from farandole.learn.pools.processes import Processes


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
    if isinstance(pool, str):
        return _named(pool)
    if "distributed" in sys.modules:  # else nobody has a client
        from distributed import Client

        if isinstance(pool, Client):
            return _on_dask(pool)
    if "farandole.comm" in sys.modules:  # else nobody has a group
        from farandole.comm import Group
        from farandole.learn.pools.ranks import Ranks

        group = getattr(pool, "group", pool)
        if isinstance(group, Group):
            return Ranks(group)
    if "farandole.server" in sys.modules:  # else nobody has a store
        from farandole.learn.pools.parameter_servers import ParameterServers
        from farandole.server import Store

        if isinstance(pool, Store):
            return ParameterServers(pool)
    raise TypeError(
        f"pool={pool!r} is no pool. Give None (threads of this process), a number of processes, an "
        "executor of concurrent.futures (also mpi4py.futures), 'ray', 'ray://host:port', a client "
        "of Dask, 'dask://host:port', the store of a worker of parameter servers "
        "(farandole.server.connect(…, rank=…)), or inside `farandole run` the run."
    )


def _named(pool: str) -> Pool:
    kind, _, place = pool.partition("://")
    if kind == "ray" and (place or pool == "ray"):
        try:
            from farandole.learn.pools.ray_actors import OnRay
        except ImportError as error:
            raise _missing(pool, "ray", error) from error
        return OnRay(pool)
    if kind == "dask" and place:
        return _on_dask(pool)
    raise UserError(
        f"pool={pool!r} is no pool. Give 'ray', 'ray://host:port' or 'dask://host:port'."
    )


def _on_dask(pool: Any) -> Pool:
    try:
        from farandole.learn.pools.dask_workers import OnDask
    except ImportError as error:
        raise _missing(pool, "dask", error) from error
    return OnDask(pool)


def _missing(pool: Any, extra: str, error: ImportError) -> UserError:
    return UserError(
        f"pool={pool!r} needs a package that cannot be imported ({error}): "
        f"pip install 'farandole[{extra}]'"
    )


def _workers_of(executor: Executor) -> int:
    """As many as it says. Only the number of tasks depends on it, not their results."""
    for name in ("_max_workers", "num_workers"):
        found = getattr(executor, name, None)
        if isinstance(found, int) and found > 0:
            return found
    return 8
