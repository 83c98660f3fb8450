"""What carries the bytes between the ranks of a job that have found each other.

On one host they meet in the store and then share memory: no sockets between them that a killed peer
could break, and little to set up. FARANDOLE_TRANSPORT, which `farandole run --transport` sets, asks
for something else.
"""

from __future__ import annotations

import os
import platform
from datetime import timedelta

from torch.distributed import PrefixStore, Store

from farandole.comm import C10d, Transport, check_transport, over_hosts
from farandole.comm.calibration import calibrate
from farandole.comm.transports.by_store import ByStore
from farandole.comm.transports.c10d import new_process_group
from farandole.comm.transports.messages import PeerLost
from farandole.comm.transports.shm.transport import SharedMemory
from farandole.environment import TRANSPORT
from farandole.errors import JoinError, UserError
from farandole.topology import Topology
from farandole.worker.environment import RankAssignment


def carrier(assignment: RankAssignment, store: Store, timeout: timedelta) -> Transport:
    """The fastest there is, or what was asked for. All ranks call it."""
    wanted = check_transport(os.environ.get(TRANSPORT) or "auto")
    if wanted == "mpi":
        raise UserError(f"transport mpi is not for hvd. Leave {TRANSPORT} out.")
    try:
        if assignment.one_host and wanted != "c10d":
            memory = _shared_memory(assignment, store, timeout)
            if memory is not None:
                return memory
        return _sockets(assignment, PrefixStore("sockets", store), timeout, wanted)
    except PeerLost as lost:
        raise JoinError(
            f"rank {assignment.rank} of {assignment.size} connects, but {lost}."
        ) from lost
    except RuntimeError as error:
        raise JoinError(
            f"rank {assignment.rank} of {assignment.size} cannot connect to the others: {error}"
        ) from error


def _shared_memory(
    assignment: RankAssignment, store: Store, timeout: timedelta
) -> Transport | None:
    """None on all ranks where there is none; those by sockets then say why."""
    meeting = ByStore(PrefixStore("memory", store), assignment.rank, assignment.size, timeout)
    try:
        found = SharedMemory.connect(meeting)
    except OSError:
        return None
    found.topology = Topology.single(assignment.size, _host())
    return found


def _sockets(
    assignment: RankAssignment, store: Store, timeout: timedelta, wanted: str
) -> Transport:
    """Between hosts; inside each it is memory if it can be."""
    process_group = new_process_group(store, assignment.rank, assignment.size, timeout)
    world = C10d(
        process_group, rank=assignment.rank, size=assignment.size, timeout=timeout, store=store
    )
    world.topology = Topology.from_names(world.share(_host()))
    found = world if wanted == "c10d" else over_hosts(world, world.topology)
    if wanted == "shm" and isinstance(found, C10d):
        raise UserError(f"transport shm: ranks on {world.topology} cannot share memory.")
    if found.name != "shm":
        calibrate(found)
    return found


def _host() -> str:
    return platform.node() or "localhost"
