"""Actors of a Ray cluster. Each keeps the chunks that it has had.

Rows go to Ray's object store when a piece is first computed, and from there to the actor that
computes it, where they stay; on one host this is shared memory. States go to the store once in each
pass. A memory map of a whole file travels by its name, and all nodes must see the file. Ray pickles
what travels: this is between the processes of its cluster.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import ray
from ray.exceptions import NodeDiedError, RayActorError, RaySystemError, RayTaskError

from farandole.errors import LaunchError
from farandole.learn.pools.base import Placed, Pool, one_blas_thread, sum_branch
from farandole.learn.pools.dispatched import Dispatched
from farandole.learn.pools.workers import LostPoolError, Workers
from farandole.learn.sources.files import by_name
from farandole.learn.sources.source import Source
from farandole.learn.sums.sum import Statistics, Sum
from farandole.learn.sums.tree import Branch

_START_SECONDS = 100.0


class OnRay(Pool):
    """`address`: "ray" for the cluster of this process (`ray.init`), which is started here if there
    is none, or "ray://host:port". `workers` actors, else one for each CPU."""

    def __init__(
        self, address: str = "ray", *, workers: int | None = None, backups: bool = True
    ) -> None:
        self._address = address
        self._workers = workers
        self._backups = backups

    @contextmanager
    def place(self, source: Source) -> Iterator[Placed]:
        started = _connect(self._address)
        try:
            count = self._workers or int(ray.cluster_resources().get("CPU", 0))
            if count < 1:
                raise LostPoolError(f"the Ray cluster {self._address!r} has no CPUs to compute on.")
            workers = _Actors(by_name(source), count)
            try:
                workers.await_first()
                yield Dispatched(source, workers, count, backups=self._backups)
            finally:
                workers.close()
        finally:
            if started:
                ray.shutdown()


def _connect(address: str) -> bool:
    """Whether this has made the connection."""
    if ray.is_initialized():
        return False
    try:
        ray.init(
            address=None if address == "ray" else address,
            log_to_driver=False,
            logging_level=logging.ERROR,
            configure_logging=False,
        )
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise LaunchError(
            f"there is no Ray cluster at {address!r}: {str(error).splitlines()[0]} Start one with "
            "`ray start --head`, or give pool='ray' for one on this host."
        ) from error
    return True


class _Actor:
    """In a process of the cluster."""

    def __init__(self) -> None:
        self._parts: dict[Branch, Source] = {}

    def ready(self) -> bool:
        return True

    def sum(self, job: Sum, state: Any, branch: Branch, part: Source | None) -> Statistics:
        if part is not None:
            self._parts[branch] = part
        with one_blas_thread():
            return sum_branch(self._parts[branch], job, state, branch)


class _Actors(Workers):
    def __init__(self, source: Source, count: int) -> None:
        self._source = source
        self._kind = ray.remote(num_cpus=1, max_restarts=0)(_Actor)
        self._parts: dict[Branch, Any] = {}  # in the object store
        self._holds: dict[str, set[Branch]] = {}
        self._actors: dict[str, Any] = {}
        self._count = 0
        for _ in range(count):
            self._add()

    def _add(self) -> None:
        name = f"Ray actor {self._count}"
        self._count += 1
        self._actors[name] = self._kind.remote()
        self._holds[name] = set()

    def await_first(self) -> None:
        """Raises `LostPoolError` if not one of them can be started."""
        refs = [actor.ready.remote() for actor in self._actors.values()]
        ready, _ = ray.wait(refs, num_returns=1, timeout=_START_SECONDS)
        if not ready:
            raise LostPoolError(
                f"not one of {len(refs)} Ray actors was started within {_START_SECONDS:g} s. Has "
                f"the cluster free CPUs? It has {ray.available_resources().get('CPU', 0):g}."
            )

    def names(self) -> Sequence[str]:
        return list(self._actors)

    def begin(self, job: Sum, state: Any) -> Any:
        return ray.put(job), ray.put(state)

    def start(self, worker: str, shared: Any, branch: Branch) -> Future[Statistics]:
        part = None
        if branch not in self._holds[worker]:
            if branch not in self._parts:
                self._parts[branch] = ray.put(self._source.part(*branch))
            part = self._parts[branch]
        found: Future[Statistics] = self._actors[worker].sum.remote(*shared, branch, part).future()
        self._holds[worker].add(branch)
        return found

    def lost(self, worker: str) -> None:
        # Another actor has another name: what this one held is lost with it.
        if self._actors.pop(worker, None) is not None and ray.cluster_resources().get("CPU", 0):
            self._add()

    def is_loss(self, error: BaseException) -> bool:
        return isinstance(error, (RayActorError, RaySystemError, NodeDiedError))

    def cause(self, error: BaseException) -> BaseException:
        return error.cause if isinstance(error, RayTaskError) else error

    def close(self) -> None:
        for actor in self._actors.values():
            ray.kill(actor)  # at once, also one that is still busy
