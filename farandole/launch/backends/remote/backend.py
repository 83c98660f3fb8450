"""Workers on other hosts: an agent on each, which starts them and looks after them there.

    this host                                               other hosts
    ┌──────────────────────────────────┐  channel  ┌────────────────────────────┐
    │ launcher                         │ ────────▶ │ agent ──▶ worker × m       │ × n
    │ store, at an address that the    │ ◀──────── │                            │
    │ others reach       worker × k    │  store    └────────────────────────────┘
    └──────────────────────────────────┘

Hosts that are expected are asked all at once, and no worker starts anywhere until each of them was
found fit. Where a worker is started on a host that was not expected, as in a job whose hosts come
and go, nobody waits for the host, and what is wrong with it is the failure of that worker.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

from farandole.environment import FORK, GRACE
from farandole.errors import LaunchError
from farandole.launch.backends.base import WorkerSpec
from farandole.launch.backends.remote.channel import Channel
from farandole.launch.backends.remote.connection import HostConnection
from farandole.launch.backends.remote.exported import exported
from farandole.launch.backends.remote.orders import Order, Setup
from farandole.launch.backends.remote.requirements import Requirements
from farandole.launch.backends.remote.worker import RemoteWorker
from farandole.launch.endpoint import LauncherEndpoint
from farandole.launch.host_facts import HostFacts, JobFiles, facts_of_this_host, script_of
from farandole.launch.job import Job
from farandole.launch.job_directory import JobDirectory
from farandole.launch.messages import tell
from farandole.launch.probes.crowding import crowding
from farandole.launch.probes.host_check import compare, marker
from farandole.launch.probes.problems import Problem, no_answer, require

CONNECT_SECONDS = 120.0
"""From the start of the channel to the agent's answer."""

SILENCE_SECONDS = 300.0
"""After which a host, or for its agent the launcher, counts as lost."""

_AGENT = "farandole.launch.backends.remote.agent"
_PATHS = ("PYTHONPATH", "LD_LIBRARY_PATH")  # without which Python may not even start
_CLOSE_SECONDS = 20.0
_POLL_SECONDS = 0.01
_NAMED_SECONDS = 10.0  # after which those that have not answered are named
NOTHING_MORE = Requirements()


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
        requirements: Requirements = NOTHING_MORE,
        silence_seconds: float = SILENCE_SECONDS,
    ) -> None:
        self._job = job
        self._directory = directory
        self._endpoint = endpoint
        self._channel = channel
        self._connect_seconds = connect_seconds
        self._requirements = requirements
        self._markers = ExitStack()  # files by which others show that they share a folder
        self._files: JobFiles | None = None
        self._here: HostFacts | None = None
        self._silence_seconds = silence_seconds
        self._connections: dict[str, HostConnection] = {}
        self._numbers = itertools.count()
        self._retired: list[HostConnection] = []  # of hosts that were lost, and came back

    def reaches(self, host: str) -> bool:
        """The channel says later whether it does."""
        return True

    def expect(self, host: str, workers: int) -> None:
        """Opens the channel. Raises `LaunchError` where its program is missing."""
        self._connection(host, workers)

    def await_hosts(self, received: Sequence[str]) -> None:
        """Each connection has a limit of its own, so that this ends."""
        name_at = time.monotonic() + _NAMED_SECONDS
        while not received:
            silent = [host for host, each in self._connections.items() if not each.is_settled]
            if not silent:
                break
            if time.monotonic() > name_at:
                name_at = float("inf")
                tell(f"waiting for an answer of {', '.join(silent)}")
            time.sleep(_POLL_SECONDS)
        self._markers.close()
        require(error for each in self._connections.values() for error in each.errors)

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

    def mark_interrupted(self) -> None:
        """The run's folder may be on the host of rank 0 alone, so the agent there does it."""
        for connection in self._connections.values():
            connection.mark_interrupted()

    def close(self) -> None:
        self._markers.close()
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
                partial(self._check, host, workers),
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
        job, files = self._job, self._needed()
        variables = {
            **exported(),
            **self._endpoint.remote_variables(),
            **job.environment,
            GRACE: f"{job.grace_seconds:g}",
        }
        return Setup(
            command=(job.program, *job.command),
            folder=files.folder,
            variables=variables,
            identity=self._directory.identity,
            worker_variable=self._directory.worker_variable,
            workers=workers,
            script=files.script,
            files=[*files.others, *files.shared],
            in_one_stream=self._directory.in_one_file,
            grace_seconds=job.grace_seconds,
            may_fork=job.fork is not False and os.environ.get(FORK) != "0",
            watches_activity=job.stall_seconds is not None,
            silence_seconds=self._silence_seconds,
        )

    def _needed(self) -> JobFiles:
        """Made once, when the first channel is opened; markers are there until all have answered.

        Raises `UserError` for a shared folder that this host cannot write to.
        """
        if self._files is None:
            job, required = self._job, self._requirements
            markers = [
                self._markers.enter_context(marker(folder)) for folder in required.shared_folders
            ]
            script = script_of(job.program, job.command)
            self._files = JobFiles(str(Path.cwd()), script, required.files, markers)
            self._here = facts_of_this_host(self._files)
        return self._files

    def _check(
        self, host: str, workers: int, there: HostFacts, ahead_seconds: float
    ) -> list[Problem]:
        assert self._here is not None
        unreachable = self._requirements.unreachable.get(host)
        if unreachable is not None:  # then it cannot reach this host either
            there = replace(there, no_way_back=None)
        return [
            *([] if unreachable is None else [unreachable]),
            *compare(host, there, self._here, self._needed(), ahead_seconds),
            *crowding(host, workers, there.cores, there.gpus),
        ]

    def _explain(self, host: str, code: int, complaints: Sequence[str]) -> Problem:
        """Why there may be no agent, and what to do."""
        channel = self._channel
        return no_answer(host, code, complaints, channel.name, channel.advice(host))
