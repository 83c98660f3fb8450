"""Worlds of real processes, for every transport between processes.

All but MPI's are forked from one process that has imported torch already, because that is what
takes long. Like the launcher, the process that forks the ranks serves their store.
"""

from __future__ import annotations

import os
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from farandole.comm import ByDevice, C10d, Group, SharedMemory, Transport, over_hosts
from farandole.comm.transports.mpi_world import mpi_world
from farandole.comm.transports.simulated.transport import SimulatedLinks
from farandole.network_link import NetworkLink
from farandole.topology import Topology
from farandole.worker.join import simulated_transport
from farandole.worker.loopback import serve_tcp_store, stay_on_loopback
from farandole.worker.store.address import LOOPBACK

Body = Callable[[Group], None]
PATIENCE = timedelta(seconds=150)  # until all have started
HOST_NAMES = "abaab"  # the hosts that the ranks of a two-level world take themselves to be on


class PretendedGpus(ByDevice):
    """As if tensors of some dtypes lay on GPUs, with NCCL between them or without."""

    def __init__(self, host: Transport, world: C10d, *, direct: bool) -> None:
        super().__init__(host, world, world if direct else None)

    @staticmethod
    def is_on_device(tensor: torch.Tensor) -> bool:
        return tensor.dtype in (torch.float32, torch.int64)

    @staticmethod
    def to_host(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone() if PretendedGpus.is_on_device(tensor) else tensor

    def _between(self, host: Transport, world: Transport) -> ByDevice:
        assert isinstance(world, C10d)
        return PretendedGpus(host, world, direct=self._direct is not None)


def run_world(transport: str, size: int, timeout: timedelta, body: Body) -> bool:
    """Calls `body(group)` on every rank, each a process. Whether all ended well."""
    if transport == "mpi":
        torch.set_num_threads(1)
        world = mpi_world(PATIENCE)  # not all ranks start at the same moment
        world.timeout = timeout
        body(Group(world))
        return True
    agent = os.fork()
    if not agent:
        os._exit(_tell(lambda: _fork_ranks(transport, size, timeout, body)))
    return not os.waitpid(agent, 0)[1]


def _fork_ranks(transport: str, size: int, timeout: timedelta, body: Body) -> None:
    """In a process of its own: one that serves a store has threads, and should not fork again."""
    stay_on_loopback()
    reading, writing = os.pipe()
    ranks = []
    for rank in range(size):
        pid = os.fork()
        if not pid:
            os.close(writing)

            def be_rank(rank: int = rank) -> None:
                port = int(os.read(reading, 5))
                body(_connect(transport, rank, size, timeout, port))

            os._exit(_tell(be_rank))
        ranks.append(pid)
    store = serve_tcp_store(timedelta(seconds=150), LOOPBACK, 0)
    os.write(writing, f"{store.port:05}".encode() * size)
    os.close(writing)
    ends = [os.waitpid(pid, 0)[1] for pid in ranks]
    assert not any(ends), f"the ranks of {size} over {transport} ended with {ends}"


def _connect(transport: str, rank: int, size: int, timeout: timedelta, port: int) -> Group:
    torch.set_num_threads(1)
    store = dist.TCPStore(LOOPBACK, port, is_master=False, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=PATIENCE)
    group = dist.group.WORLD
    assert isinstance(group, dist.ProcessGroup)
    missing = dist.PrefixStore("missing", store)
    world = C10d(group, rank=rank, size=size, timeout=timeout, store=missing)
    if transport == "shm":
        return Group(SharedMemory.connect(world))
    if transport in ("staged", "direct"):
        return Group(
            PretendedGpus(SharedMemory.connect(world), world, direct=transport == "direct")
        )
    if transport == "hosts":
        return Group(over_hosts(world, Topology.from_names(HOST_NAMES[:size])))
    if transport.startswith("simulated-"):
        # Rank i finds the same file as the others: all are children of one process.
        links = SimulatedLinks(
            Topology.from_names(HOST_NAMES[:size]),
            NetworkLink.read("100gbit"),
            Path(tempfile.gettempdir()) / f"farandole-links-{os.getppid()}",
        )
        return Group(simulated_transport(world, transport.removeprefix("simulated-"), links))
    return Group(world)


def _tell(work: Callable[[], None]) -> int:
    """Runs it; an exit code. A forked process must not return into the code of its parent."""
    try:
        work()
        return 0
    except BaseException:
        traceback.print_exc()
        return 1
