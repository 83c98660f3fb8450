"""What carries the bytes between ranks that have found each other, and may have to do so again.

On one host they meet in the store and then share memory: no sockets between them that a killed peer
could break, and little to set up. Nothing here is global to a process, as PyTorch's default process
group is: under Horovod's interface and in elastic jobs the ranks of a process change.
"""

from __future__ import annotations

import platform
from datetime import timedelta

import torch
from torch.distributed import PrefixStore, Store

from farandole.comm import C10d, Transport
from farandole.comm.transports.by_store import ByStore
from farandole.comm.transports.c10d import new_process_group
from farandole.comm.transports.messages import PeerLost
from farandole.comm.transports.shm.transport import SharedMemory
from farandole.errors import JoinError
from farandole.topology import Topology
from farandole.worker.environment import RankAssignment
from farandole.worker.join import choose_transport


def carrier(
    assignment: RankAssignment,
    store: Store,
    timeout: timedelta,
    wanted: str = "auto",
    connecting: timedelta | None = None,
) -> Transport:
    """The fastest there is, or what is `wanted`. All ranks call it, with a store of their own.

    Raises `JoinError` when a rank is lost meanwhile: between hosts that is seen after `connecting`,
    if it is given, or else after the timeout.
    """
    try:
        if assignment.one_host and wanted != "c10d":
            memory = _shared_memory(assignment, store, timeout)
            if memory is not None:
                return memory
        sockets = PrefixStore("sockets", store)
        return _sockets(assignment, sockets, timeout, wanted, connecting or timeout)
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
    assignment: RankAssignment,
    store: Store,
    timeout: timedelta,
    wanted: str,
    connecting: timedelta,
) -> Transport:
    """Between hosts; inside each it is memory if it can be."""
    rank, size = assignment.rank, assignment.size
    process_group = new_process_group(store, rank, size, connecting)
    process_group.set_timeout(timeout)
    world = C10d(process_group, rank=rank, size=size, timeout=timeout, store=store)
    # This carries CPU tensors alone.
    return choose_transport(world, torch.device("cpu"), wanted)


def _host() -> str:
    return platform.node() or "localhost"
