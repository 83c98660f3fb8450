"""Workers of a Dask cluster (`distributed`). Each keeps the chunks that it has had.

Rows are sent to the worker that first computes their piece, and stay there. Tasks are tied to one
worker, so that a second copy of a slow one runs elsewhere. Dask pickles what travels: this is
between the processes of its cluster.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager
from typing import Any

from distributed import Client
from distributed.comm import CommClosedError
from distributed.scheduler import KilledWorker

from farandole.errors import LaunchError
from farandole.learn.pools.base import Placed, Pool, one_blas_thread, sum_branch
from farandole.learn.pools.dispatched import Dispatched
from farandole.learn.pools.workers import LostPoolError, Workers
from farandole.learn.sources.files import by_name
from farandole.learn.sources.source import Source
from farandole.learn.sums.sum import Statistics, Sum
from farandole.learn.sums.tree import Branch

_START_SECONDS = 100.0
_ASK_SECONDS = 1.0  # not more often: it is a message to the scheduler and back


class OnDask(Pool):
    """`cluster`: a client, which stays open, or "dask://host:port" of a scheduler. `start_seconds`:
    so long a scheduler without workers is waited for."""

    def __init__(
        self,
        cluster: Client | str,
        *,
        backups: bool = True,
        start_seconds: float = _START_SECONDS,
    ) -> None:
        self._cluster = cluster
        self._backups = backups
        self._start_seconds = start_seconds

    @contextmanager
    def place(self, source: Source) -> Iterator[Placed]:
        if not isinstance(self._cluster, str):
            with self._placed(source, self._cluster) as placed:
                yield placed
            return
        address = self._cluster.replace("dask://", "tcp://", 1)
        try:
            client = Client(address, timeout=self._start_seconds, set_as_default=False)
        except (OSError, ValueError) as error:
            raise LaunchError(
                f"there is no Dask scheduler at {self._cluster!r}: {error} Start one with `dask "
                "scheduler`, or give a distributed.Client."
            ) from error
        with client, self._placed(source, client) as placed:
            yield placed

    @contextmanager
    def _placed(self, source: Source, client: Client) -> Iterator[Placed]:
        workers = _DaskWorkers(by_name(source), client)
        workers.await_first(self._start_seconds)
        try:
            yield Dispatched(source, workers, len(workers.names()), backups=self._backups)
        finally:
            workers.close()


class _DaskWorkers(Workers):
    def __init__(self, source: Source, client: Client) -> None:
        self._source = source
        self._client = client
        self._parts: dict[tuple[str, Branch], Any] = {}  # by address of the worker
        self._known: Sequence[str] = ()
        self._asked = -_ASK_SECONDS

    def await_first(self, seconds: float) -> None:
        """Raises `LostPoolError` if there are no workers."""
        deadline = time.monotonic() + seconds
        while not self.names():
            if time.monotonic() > deadline:
                raise LostPoolError(
                    f"the Dask cluster at {self._client.scheduler_info()['address']} has had no "
                    f"workers for {seconds:g} s. Start some with `dask worker ADDRESS`."
                )
            time.sleep(0.1)

    def names(self) -> Sequence[str]:
        """One for each thread of each worker: they compute side by side."""
        try:
            known = self._client.scheduler_info(n_workers=-1)["workers"]
        except (OSError, CommClosedError) as error:
            raise LostPoolError(f"the Dask scheduler does not answer: {error}") from error
        self._asked = time.monotonic()
        self._known = [
            f"{address} thread {number}"
            for address in sorted(known)
            for number in range(known[address]["nthreads"])
        ]
        return self._known

    def begin(self, job: Sum, state: Any) -> _Shared:
        return _Shared(self._client, [job, state])

    def start(self, worker: str, shared: _Shared, branch: Branch) -> Future[Statistics]:
        address = worker.split()[0]
        key = address, branch
        part = self._parts.get(key)
        if part is None or not _is_there(part):
            part = self._parts[key] = self._sent_to(address, self._source.part(*branch))
        needed = [part, *shared.on_workers()]
        task = self._client.submit(_sum, *needed, branch, workers=[address], pure=False)
        return _as_future(task)

    def _sent_to(self, address: str, part: Source) -> Any:
        try:
            return self._client.scatter(part, workers=[address], hash=False)
        except (TimeoutError, KeyError) as error:  # it waits for such a worker, or knows none
            raise CommClosedError(f"{address} is not there any more: {error!r}") from error

    def gone(self, workers: Collection[str]) -> Collection[str]:
        # A task that is tied to a worker which has gone would wait for its return.
        if time.monotonic() - self._asked < _ASK_SECONDS:
            return ()
        known = set(self.names())
        return [worker for worker in workers if worker not in known]

    def lost(self, worker: str) -> None:
        address = worker.split()[0]
        self._parts = {key: part for key, part in self._parts.items() if key[0] != address}

    def is_loss(self, error: BaseException) -> bool:
        return isinstance(error, (KilledWorker, CancelledError, CommClosedError))

    def lost_elsewhere(self, worker: str, error: BaseException) -> bool:
        return isinstance(error, CancelledError) and worker in self.names()

    def close(self) -> None:
        self._parts.clear()  # which lets the workers forget them


class _Shared:
    """What all tasks of a pass need: one copy for every worker, instead of one for every task.

    Dask takes most of the copies for superfluous, and drops them after some seconds. So a worker
    that is lost may take the last one with it; then all workers get new ones.
    """

    def __init__(self, client: Client, values: Sequence[Any]) -> None:
        self._client = client
        self._values = values
        self._copies = self._send()

    def on_workers(self) -> Sequence[Any]:
        if not all(map(_is_there, self._copies)):
            self._copies = self._send()
        return self._copies

    def _send(self) -> Sequence[Any]:
        sent: Sequence[Any] = self._client.scatter(self._values, broadcast=True, hash=False)
        return sent


def _is_there(sent: Any) -> bool:
    """Somewhere in the cluster."""
    return bool(sent.status == "finished")


def _sum(part: Source, job: Sum, state: Any, branch: Branch) -> Statistics:
    with one_blas_thread():
        return sum_branch(part, job, state, branch)


def _as_future(task: Any) -> Future[Statistics]:
    """Dask's futures cannot be waited for together with a limit."""
    found: Future[Statistics] = Future()

    def done(task: Any) -> None:
        try:
            found.set_result(task.result())
        except BaseException as error:
            found.set_exception(error)

    task.add_done_callback(done)
    return found
