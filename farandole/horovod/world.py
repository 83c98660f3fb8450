"""From how this process was started to a group of all ranks, as often as `hvd.init()` is called.

PyTorch's default process group is left to the script, which may want one of its own.
"""

from __future__ import annotations

import os
from collections import Counter
from datetime import timedelta

import psutil
import torch
from torch.distributed import PrefixStore, Store

from farandole.comm import Exchange, Group, InProcess, check_transport
from farandole.environment import HOROVOD_RANK_OWNER, TRANSPORT
from farandole.errors import UserError
from farandole.horovod.engine.gpus import GpuLinks
from farandole.worker import elastic as rejoining
from farandole.worker.carriers import carrier
from farandole.worker.environment import RankAssignment, detect
from farandole.worker.loopback import stay_on_loopback
from farandole.worker.rendezvous import (
    find_store,
    forget_announcement,
    require_all_ranks,
    store_for_nccl,
)

_MORE_TIME = "HOROVOD_GLOO_TIMEOUT_SECONDS"


class JobConnection:
    """Where this process meets its job, kept from one `hvd.init()` to the next."""

    def __init__(self) -> None:
        self._generation = -1
        self._store: Store | None = None
        self._times: Counter[str] = Counter()  # that a job's ranks have met

    def group(self, timeout: timedelta) -> tuple[RankAssignment, Group, GpuLinks | None]:
        """Joins all other ranks. Raises `JoinError` naming those that did not come in time."""
        if rejoining.is_elastic(os.environ):
            assignment = rejoining.next_assignment(os.environ, self._generation, timeout)
            self._generation = assignment.attempt
        else:
            assignment = detect(os.environ)
        _require_first(assignment)
        if assignment.size == 1:
            return assignment, Group(InProcess(Exchange(1, timeout), 0)), None
        if assignment.one_host:
            stay_on_loopback()
        job = f"{assignment.job}/{assignment.attempt}"
        try:
            if self._store is None:
                self._store = find_store(assignment, timeout)
            # Counted only when all have come: a rank that gave up, and comes again, must not look
            # for the others where they will be the next time.
            name = f"horovod/{job}/{self._times[job] + 1}"
            store = PrefixStore(name, self._store)
            require_all_ranks(PrefixStore("arrived", store), assignment, timeout, "hvd.init()")
            self._times[job] += 1
        finally:
            forget_announcement(assignment)
        group = Group(carrier(assignment, store, timeout, _wanted()), more_time=_MORE_TIME)
        if torch.cuda.is_available():
            store = PrefixStore(name, store_for_nccl(assignment, self._store, timeout))
        return assignment, group, GpuLinks(store, assignment.local_size)


def _wanted() -> str:
    """The transport that FARANDOLE_TRANSPORT, set by `farandole run --transport`, asks for."""
    wanted = check_transport(os.environ.get(TRANSPORT) or "auto")
    if wanted == "mpi":
        raise UserError(f"transport mpi is not for hvd. Leave {TRANSPORT} out.")
    return wanted


def _require_first(assignment: RankAssignment) -> None:
    """A process that a worker starts inherits its variables, but not its rank.

    That is what becomes of a script that calls `hvd.init()` at its top level, and has a DataLoader
    whose workers are spawned: they import the script.
    """
    owner = f"{assignment.job}/{assignment.rank}/{os.getpid()}"
    before = os.environ.get(HOROVOD_RANK_OWNER, owner)
    job, rank, pid = before.rsplit("/", 2)
    is_another = int(pid) != os.getpid() and psutil.pid_exists(int(pid))
    if assignment.size > 1 and job == assignment.job and is_another:
        raise UserError(
            f"hvd.init(): process {pid} has this rank ({rank}), and process {os.getpid()} was "
            "started by it, perhaps to load data. Put what only the script itself shall do under "
            "if __name__ == '__main__'."
        )
    os.environ[HOROVOD_RANK_OWNER] = owner
