"""Workers on other hosts: an agent on each, which starts them and looks after them there.

    this host                                               other hosts
    ┌──────────────────────────────────┐  channel  ┌────────────────────────────┐
    │ launcher                         │ ────────▶ │ agent ──▶ worker × m       │ × n
    │ store, at an address that the    │ ◀──────── │                            │
    │ others reach       worker × k    │  store    └────────────────────────────┘
    └──────────────────────────────────┘

The first worker of a host opens the channel, and nobody waits for it. What is wrong with a host is
told as the failure of its workers.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
from functools import partial
from pathlib import Path

from farandole.environment import FORK, GRACE
from farandole.errors import LaunchError
from farandole.launch.backends.base import WorkerSpec
from farandole.launch.backends.remote.channel import Channel
from farandole.launch.backends.remote.connection import HostConnection
from farandole.launch.backends.remote.exported import exported
from farandole.launch.backends.remote.facts_check import check_facts
from farandole.launch.backends.remote.orders import Order, Setup
from farandole.launch.backends.remote.worker import RemoteWorker
from farandole.launch.endpoint import LauncherEndpoint
from farandole.launch.host_facts import HostFacts, facts_of_this_host, script_of
from farandole.launch.job import Job
from farandole.launch.job_directory import JobDirectory

CONNECT_SECONDS = 120.0
"""From the start of the channel to the agent's answer."""

SILENCE_SECONDS = 300.0
"""After which a host, or for its agent the launcher, counts as lost."""

_AGENT = "farandole.launch.backends.remote.agent"
_PATHS = ("PYTHONPATH", "LD_LIBRARY_PATH")  # without which Python may not even start
_CLOSE_SECONDS = 20.0
_NOT_THERE = (126, 127)  # what shells and `env` answer for a program that they cannot start


class RemoteBackend:
    """Starts workers on other hosts, which `channel` reaches."""

    def __init__(
        self,
        job: Job,
        directory: JobDirectory,
        endpoint: LauncherEndpoint,
        channel: Channel,
        *,
        connect_seconds: float = CONNECT_SECONDS,
        silence_seconds: float = SILENCE_SECONDS,
    ) -> None:
        self._job = job
        self._directory = directory
        self._endpoint = endpoint
        self._channel = channel
        self._connect_seconds = connect_seconds
        self._silence_seconds = silence_seconds
        self._folder = Path.cwd()
        self._script = script_of(job.program, job.command, self._folder)
        self._connections: dict[str, HostConnection] = {}
        self._numbers = itertools.count()
        self._retired: list[HostConnection] = []  # of hosts that were lost, and came back

    def reaches(self, host: str) -> bool:
        """The channel says later whether it does."""
        return True

    def expect(self, host: str, workers: int) -> None:
        """Opens the channel. Raises `LaunchError` where its program is missing."""
        self._connection(host, workers)

    def start(self, spec: WorkerSpec) -> RemoteWorker:
        """Raises `LaunchError` where the channel's program is missing."""
        directory, number = self._directory, spec.number
        directory.error_file(number).unlink(missing_ok=True)  # an earlier life's
        connection = self._connection(spec.host, spec.local_workers)
        files = None
        if not directory.is_shown_by_itself(number):
            files = directory.stdout_file(number), directory.stderr_file(number)
        worker = RemoteWorker(number, connection, files, directory.error_file(number))
        own = self._job.per_rank[number] if self._job.per_rank else {}
        variables = {
            "LOCAL_WORLD_SIZE": str(spec.local_workers),
            **spec.variables,
            **self._job.environment,
            **own,
        }
        connection.start(worker, Order(spec.local_workers, variables))
        return worker

    def close(self) -> None:
        connections = [*self._connections.values(), *self._retired]
        for connection in connections:
            connection.close()
        deadline = time.monotonic() + _CLOSE_SECONDS
        for connection in connections:
            connection.join(deadline)

    def _connection(self, host: str, workers: int) -> HostConnection:
        known = self._connections.get(host)
        if known is not None and not known.is_over:
            return known
        if known is not None:
            self._retired.append(known)
        opened = self._connections[host] = self._open(host, workers)
        return opened

    def _open(self, host: str, workers: int) -> HostConnection:
        # Standard input carries the rest; this is what it takes to find the agent at all.
        paths = [f"{name}={os.environ[name]}" for name in _PATHS if name in os.environ]
        words = self._channel.words(host, ["env", *paths, sys.executable, "-m", _AGENT])
        log = self._directory.folder / f"host-{next(self._numbers)}.err"
        try:
            return HostConnection(
                host,
                words,
                self._setup(workers),
                partial(self._check, host),
                partial(self._explain, host),
                self._channel.advice(host),
                log,
                self._connect_seconds,
            )
        except OSError as error:
            raise LaunchError(
                f"cannot start `{words[0]}` to reach host {host}: {error}. Install it here."
            ) from error

    def _setup(self, workers: int) -> Setup:
        job = self._job
        variables = {
            **exported(),
            **self._endpoint.remote_variables(),
            **job.environment,
            GRACE: f"{job.grace_seconds:g}",
        }
        return Setup(
            command=(job.program, *job.command),
            folder=str(self._folder),
            variables=variables,
            identity=self._directory.identity,
            worker_variable=self._directory.worker_variable,
            workers=workers,
            script=None if self._script is None else str(self._script),
            in_one_stream=self._directory.in_one_file,
            grace_seconds=job.grace_seconds,
            may_fork=job.fork is not False and os.environ.get(FORK) != "0",
            silence_seconds=self._silence_seconds,
        )

    def _check(self, host: str, there: HostFacts, within_seconds: float) -> list[str]:
        here = facts_of_this_host(self._script)
        return check_facts(host, here, there, self._script, within_seconds)

    def _explain(self, host: str, code: int) -> str:
        """Why there may be no agent, and what to do."""
        if code in _NOT_THERE:
            return (
                f"there is no {sys.executable} on host {host}. Install the same Python there, at "
                "the same path, with torch and Farandole; or start the job with one that is there."
            )
        return (
            f"host {host} cannot be reached, or {sys.executable} there has no Farandole (exit code "
            f"{code}). {self._channel.advice(host)}"
        )
