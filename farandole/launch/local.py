"""Starts a script on the workers of this host, on TorchElastic's agent.

    launcher process                                  worker processes
    ┌─────────────────────────────┐   start, watch    ┌──────────────────┐
    │ LocalElasticAgent           │ ────────────────▶ │ python script.py │ × n
    │ store on 127.0.0.1          │ ◀──────────────── │   fd.init()      │
    │ prefixes and prints output  │   log files       └──────────────────┘
    └─────────────────────────────┘

Ends in one of three ways: all workers exit with 0; one fails and the rest are stopped; the
launcher is told to stop (Ctrl-C, SIGTERM) and stops them all. In every case no process is left.
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import psutil
from torch.distributed import PrefixStore
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import LogsDest, LogsSpecs, SignalException
from torch.distributed.elastic.rendezvous.api import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
)

from farandole.errors import LaunchError, UserError
from farandole.launch.cores import fair_share
from farandole.launch.failure import Failure, first_cause, read_failure
from farandole.launch.loopback import LOOPBACK, serve_store, stay_on_loopback
from farandole.launch.orphans import LAUNCHER
from farandole.launch.output import Relay, Source
from farandole.launch.signals import handlers_kept, stop_signals, undisturbed

_STORE_TIMEOUT = timedelta(seconds=60)


@dataclass(frozen=True)
class Job:
    """A script to run on `workers` processes of this host."""

    workers: int
    command: Sequence[str]  # what follows `python`: a script and its arguments, or -m module …
    environment: Mapping[str, str] = field(default_factory=dict)
    rank0_owns_terminal: bool = False  # rank 0 writes to the terminal itself, so it can redraw

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise UserError(f"{self.workers} workers cannot run anything; ask for 1 or more.")


@dataclass(frozen=True)
class Outcome:
    """How a job ended. `failure` is the cause, `failed` every rank that ended badly."""

    failure: Failure | None = None
    failed: tuple[int, ...] = ()
    stopped_by: str | None = None  # the signal that the launcher was stopped with
    logs: Path | None = None  # kept only when a worker failed

    @property
    def exit_code(self) -> int:
        if self.stopped_by is not None:
            return 130
        if self.failure is None:
            return 0
        code = self.failure.exit_code
        return code if code > 0 else 128 - code


def launch(job: Job) -> Outcome:
    """Runs `job` to its end and says how it went. Leaves no process behind, whatever happens."""
    with handlers_kept():
        return _launch(job)


def _launch(job: Job) -> Outcome:
    _silence_agent()
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = ",".join(stop_signals())
    identity = uuid.uuid4().hex
    try:
        logs = Path(tempfile.mkdtemp(prefix="farandole-logs-"))
    except OSError as error:
        raise LaunchError(
            f"cannot keep the workers' output: {error}. Set TMPDIR to a folder with room."
        ) from error
    streams = _Streams(logs, job, {**_worker_environment(job), "FARANDOLE_JOB": identity})
    agent = LocalElasticAgent(
        WorkerSpec(
            role="worker",
            local_world_size=job.workers,
            entrypoint=sys.executable,
            args=tuple(job.command),
            rdzv_handler=_OneHost(identity),
            max_restarts=0,
            monitor_interval=0.05,
            master_addr=LOOPBACK,
        ),
        logs_specs=streams,
    )
    relay = Relay(streams.sources())
    relay.start()
    result, stopped_by = None, None
    try:
        result = agent.run()
    except (KeyboardInterrupt, SignalException) as stop:
        stopped_by = stop.sigval.name if isinstance(stop, SignalException) else "SIGINT"
    finally:
        with undisturbed():
            _reap(identity)
            relay.stop()
    if result is None or not result.is_failed():
        shutil.rmtree(logs, ignore_errors=True)
        return Outcome(stopped_by=stopped_by)
    failures = [
        read_failure(
            rank,
            found.exitcode,
            found.timestamp,
            streams.error_file(rank),
            streams.stderr_file(rank),
        )
        for rank, found in result.failures.items()
    ]
    cause = first_cause(failures)
    return Outcome(cause, tuple(sorted(result.failures)), logs=logs)


def _silence_agent() -> None:
    """What it has to say, we say better. Its loggers have levels of their own."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)


def _worker_environment(job: Job) -> dict[str, str]:
    defaults = {
        "OMP_NUM_THREADS": str(fair_share(job.workers)),
        "PYTHONUNBUFFERED": "1",  # a line shows when it is printed, not when a buffer fills
    }
    stay_on_loopback(defaults)  # here, for scripts that form a process group of their own
    unset = {key: value for key, value in defaults.items() if key not in os.environ}
    return {**unset, **job.environment, LAUNCHER: str(os.getpid())}


class _OneHost(RendezvousHandler):
    """A rendezvous of one agent with itself, around a store that listens on loopback only."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._store = serve_store(_STORE_TIMEOUT)

    @property
    def use_agent_store(self) -> bool:
        return True

    def get_backend(self) -> str:
        return "farandole"

    def next_rendezvous(self) -> RendezvousInfo:
        where = RendezvousStoreInfo(LOOPBACK, self._store.port)
        return RendezvousInfo(PrefixStore(self._run_id, self._store), 0, 1, where)

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """One host has nobody to tell."""

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        return True


class _Streams(LogsSpecs):
    """Where each worker's output goes, and the variables it starts with."""

    def __init__(self, folder: Path, job: Job, environment: Mapping[str, str]) -> None:
        super().__init__(str(folder))
        self._folder = folder
        self._job = job
        self._environment = environment

    @property
    def root_log_dir(self) -> str:
        return str(self._folder)

    def error_file(self, rank: int) -> Path:
        return self._folder / f"rank-{rank}.error.json"

    def stderr_file(self, rank: int) -> Path:
        return self._folder / f"rank-{rank}.err"

    def stdout_file(self, rank: int) -> Path:
        return self._folder / f"rank-{rank}.out"

    def sources(self) -> list[Source]:
        """What is to be shown, each line with its rank in front."""
        first = 1 if self._job.rank0_owns_terminal else 0
        return [
            Source(path, f"[{rank}] ", target)
            for rank in range(first, self._job.workers)
            for path, target in (
                (self.stdout_file(rank), sys.stdout.buffer),
                (self.stderr_file(rank), sys.stderr.buffer),
            )
        ]

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        out = {rank: str(self.stdout_file(rank)) for rank in envs}
        err = {rank: str(self.stderr_file(rank)) for rank in envs}
        errors = {rank: str(self.error_file(rank)) for rank in envs}
        for rank, variables in envs.items():
            variables.update(self._environment)
            variables["TORCHELASTIC_ERROR_FILE"] = errors[rank]
        if self._job.rank0_owns_terminal:
            out[0] = err[0] = ""  # the agent's word for "leave it alone"
        return LogsDest(out, err, error_files=errors)


def _reap(identity: str) -> None:
    """Kills what is left of the job, such as data-loading children of a worker that was killed."""
    left = [process for process in psutil.process_iter() if _belongs(process, identity)]
    for process in left:
        try:
            process.kill()
        except psutil.Error:
            continue
    psutil.wait_procs(left, timeout=5)


def _belongs(process: psutil.Process, identity: str) -> bool:
    try:
        return process.environ().get("FARANDOLE_JOB") == identity
    except (psutil.Error, OSError):
        return False
