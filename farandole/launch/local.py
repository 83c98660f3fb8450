"""Starts a script on the workers of this host, on TorchElastic's agent.

    launcher process                                  worker processes
    ┌─────────────────────────────┐   start, watch    ┌──────────────────┐
    │ LocalElasticAgent           │ ────────────────▶ │ python script.py │ × n
    │ store on 127.0.0.1          │ ◀──────────────── │   fd.init()      │
    │ prefixes and prints output  │   log files       └──────────────────┘
    └─────────────────────────────┘

Ends in one of three ways: all workers exit with 0; one fails and the rest are stopped; the
launcher is told to stop (Ctrl-C, SIGTERM) and stops them all. In every case no process is left.
A tolerant job, which goes on without a worker that failed, is not for the agent: see `supervisor`.
"""

from __future__ import annotations

import logging
import os
from datetime import timedelta

from torch.distributed import PrefixStore
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import LogsDest, LogsSpecs, SignalException
from torch.distributed.elastic.rendezvous.api import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
)

from farandole.launch.failure import first_cause
from farandole.launch.job import Job, Outcome
from farandole.launch.loopback import LOOPBACK, serve_store
from farandole.launch.output import Relay
from farandole.launch.signals import handlers_kept, stop_signals, undisturbed
from farandole.launch.supervisor import supervise
from farandole.launch.workplace import Workplace

__all__ = ["Job", "Outcome", "launch"]

_STORE_TIMEOUT = timedelta(seconds=60)


def launch(job: Job) -> Outcome:
    """Runs `job` to its end and says how it went. Leaves no process behind, whatever happens."""
    if job.tolerant:
        return supervise(job)
    with handlers_kept():
        return _launch(job)


def _launch(job: Job) -> Outcome:
    _silence_agent()
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = ",".join(stop_signals())
    place = Workplace(job)
    agent = LocalElasticAgent(
        WorkerSpec(
            role="worker",
            local_world_size=job.workers,
            entrypoint=job.program,
            args=tuple(job.command),
            rdzv_handler=_OneHost(place.identity),
            max_restarts=0,
            monitor_interval=0.05,
            master_addr=LOOPBACK,
        ),
        logs_specs=_Streams(place),
    )
    relay = Relay(place.sources())
    relay.start()
    result, stopped_by = None, None
    try:
        result = agent.run()
    except (KeyboardInterrupt, SignalException) as stop:
        stopped_by = stop.sigval.name if isinstance(stop, SignalException) else "SIGINT"
    finally:
        with undisturbed():
            place.reap()
            relay.stop()
    if result is None or not result.is_failed():
        place.remove()
        return Outcome(stopped_by=stopped_by)
    failures = [
        place.failure(rank, found.exitcode, found.timestamp)
        for rank, found in result.failures.items()
    ]
    cause = first_cause(failures)
    return Outcome(cause, tuple(sorted(result.failures)), logs=place.folder)


def _silence_agent() -> None:
    """What it has to say, we say better. Its loggers have levels of their own."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)


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
    """Where each worker's output goes, and the variables it starts with, as the agent asks."""

    def __init__(self, place: Workplace) -> None:
        super().__init__(str(place.folder))
        self._place = place

    @property
    def root_log_dir(self) -> str:
        return str(self._place.folder)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        place = self._place
        out = {rank: str(place.stdout_file(rank)) for rank in envs}
        err = {rank: str(place.stderr_file(rank)) for rank in envs}
        errors = {rank: str(place.error_file(rank)) for rank in envs}
        for rank, variables in envs.items():
            variables.update(place.environment(rank))
            if place.is_shown_by_itself(rank):
                out[rank] = err[rank] = ""  # the agent's word for "leave it alone"
        return LogsDest(out, err, error_files=errors)
