"""From a rank to a group: find the other ranks and form the process group with them.

`rendezvous` finds them; here they become PyTorch's default process group, or use one that is
there, and the fastest transport between them is chosen.
"""

from __future__ import annotations

import os
import platform
import sys
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore

from farandole.comm import (
    TRANSPORTS,
    ByDevice,
    C10d,
    Exchange,
    Group,
    InProcess,
    SharedMemory,
    Transport,
    over_hosts,
)
from farandole.comm.calibration import calibrate
from farandole.comm.gpu_sharing import nccl_serves, nccl_text
from farandole.comm.transports.c10d import NCCL_PATIENCE
from farandole.comm.transports.messages import PeerLost
from farandole.comm.transports.shared_gpu.transport import SharedGpu
from farandole.comm.transports.simulated.transport import Simulated, SimulatedLinks
from farandole.environment import SERVER_KEY, SERVERS
from farandole.errors import JoinError, UserError
from farandole.schedule import Link
from farandole.topology import Topology
from farandole.worker.environment import RankAssignment
from farandole.worker.failure import record_leaving
from farandole.worker.loopback import stay_on_loopback
from farandole.worker.rendezvous import (
    find_store,
    forget_announcement,
    require_all_ranks,
    store_for_nccl,
)


def join(
    assignment: RankAssignment,
    device: torch.device,
    *,
    ranks_per_gpu: int,
    timeout: timedelta,
    transport: str = "auto",
    links: SimulatedLinks | None = None,
) -> Group:
    """This rank's end of the world group. With `links` between pretended hosts, if any are given.
    `ranks_per_gpu`: of this host, where `device` is a GPU.

    Raises `JoinError` naming the ranks that did not arrive within `timeout`.
    """
    if os.environ.get(SERVERS):
        return _join_servers(assignment, os.environ[SERVERS], timeout, links)
    if assignment.size == 1:
        return Group(InProcess(Exchange(1, timeout), 0))
    if links is not None:
        _check_links(links, device, transport)
    if transport == "mpi":
        return _join_mpi(assignment, device, timeout)
    if dist.is_initialized():
        _adopt(assignment)
    else:
        _form(assignment, device, ranks_per_gpu, timeout)
    world = c10d_world(timeout)
    try:
        if links is not None:
            return Group(simulated_transport(world, transport, links))
        return Group(choose_transport(world, device, transport))
    except PeerLost as waited_for:
        lost = world.blame(waited_for)
        raise JoinError(
            f"rank {assignment.rank} of {assignment.size} connects, but {lost}."
        ) from lost


def _join_servers(
    assignment: RankAssignment, address: str, timeout: timedelta, links: SimulatedLinks | None
) -> Group:
    """By way of the parameter servers' registrar, which knows who lives: a dead rank is missed."""
    from farandole.server.client.simulated_link import link_to_servers
    from farandole.server.client.store import Store as Servers
    from farandole.server.registrar.transport import RegistrarTransport  # few jobs need pyzmq

    key_file = os.environ.get(SERVER_KEY)
    if not key_file:
        raise JoinError(f"{SERVERS}={address} is set, and {SERVER_KEY} (a file) is not.")
    late = assignment.attempt > 0
    seconds = timeout.total_seconds()
    store = Servers(
        address,
        key_file,
        rank=assignment.rank,
        timeout=seconds,
        late=late,
        job=assignment.job,
        workers=assignment.size,
        link=None if links is None else link_to_servers(links, assignment.rank),
    )
    transport = RegistrarTransport(store, assignment.rank, assignment.size, timeout, late=late)
    transport.topology = Topology.from_names(transport.share(platform.node() or "localhost"))
    return Group(transport)


def choose_transport(world: C10d, device: torch.device, transport: str) -> Transport:
    """What carries the bytes between these ranks fastest, or what was asked for.

    Raises `UserError` where shared memory was asked for, and there is none.
    """
    # All ranks learn all names, so all of them build the same topology and choose the same
    # transports.
    world.topology = Topology.from_names(world.share(platform.node() or "localhost"))
    found: Transport
    if transport in TRANSPORTS:
        found = TRANSPORTS[transport](world)
    else:
        found = world if transport == "c10d" else over_hosts(world, world.topology)
    if transport == "shm" and isinstance(found, C10d):
        raise UserError(
            f"transport='shm' was asked for, and ranks on {world.topology} cannot share memory."
        )
    if found.name != "shm":  # there auto has nothing to choose
        calibrate(found)
    if device.type == "cpu" or (found is world and world.has_nccl):
        return found
    if world.has_nccl:
        return ByDevice(found, world, world)
    direct = None if transport == "c10d" else SharedGpu.connect(found, world, device)
    if direct is None and world.rank == 0:
        warnings.warn(
            "tensors on GPUs travel through the memory of the host (gloo), which takes several "
            f"times as long as training on a fast GPU: NCCL ({nccl_text()}) does not serve these "
            "workers. From 2.30 on it serves several on one GPU.",
            stacklevel=2,
        )
    return found if found is world and direct is None else ByDevice(found, world, direct)


_MANY_BYTES = 1 << 20  # of which what a byte costs is an average


def simulated_transport(world: C10d, transport: str, links: SimulatedLinks) -> Transport:
    """As `choose_transport`, as if the ranks were on the pretended hosts, with links between them.

    Raises `UserError` where they are on several real ones.
    """
    real = Topology.from_names(world.share(platform.node() or "localhost"))
    if len(real.hosts) > 1:
        raise UserError(
            f"--link {links.link}: simulated links are for pretended hosts of one machine, and the "
            f"ranks are on real ones ({real}). Leave --link out."
        )
    carrier: Transport = world
    if transport == "shm":
        try:
            carrier = SharedMemory.connect(world)
        except OSError as error:
            raise UserError(
                f"transport='shm' was asked for, and the ranks cannot share memory: {error}"
            ) from None
    hosts = [links.topology.host_index(rank) for rank in range(world.size)]
    between = Simulated(carrier, hosts, links.clock())
    # As between real hosts: if "c10d" was asked for also inside a host.
    found = between if transport == "c10d" else over_hosts(between, links.topology)
    found.topology = links.topology
    # Known, so that it need not be measured, which would take seconds on a slow one.
    usual, link = found.link, links.link
    found.link = Link(
        usual.seconds_per_message + link.delay_seconds, link.seconds(_MANY_BYTES) / _MANY_BYTES
    )
    return found


def _check_links(links: SimulatedLinks, device: torch.device, transport: str) -> None:
    if device.type != "cpu":
        raise UserError(
            f"--link {links.link}: simulated links carry tensors of CPUs, and the workers compute "
            f"on {device.type}. Leave --link out, or hide the GPUs: CUDA_VISIBLE_DEVICES= ."
        )
    if transport not in ("auto", "shm", "c10d"):
        raise UserError(
            f"--link {links.link}: no link can be simulated for the transport {transport!r}. "
            "Take auto, shm or c10d, or leave --link out."
        )


def _join_mpi(assignment: RankAssignment, device: torch.device, timeout: timedelta) -> Group:
    """MPI throughout: no store, no sockets of ours."""
    if assignment.launcher in ("farandole", "torchrun") or device.type == "cuda":
        raise JoinError(
            f"transport='mpi' is for ranks on CPUs that mpirun or srun started; these were started "
            f"by {assignment.launcher} and compute on {device.type}. Leave the transport to 'auto'."
        )
    from farandole.comm.transports.mpi_world import mpi_world  # few jobs need it

    world = mpi_world(timeout)
    if (world.rank, world.size) != (assignment.rank, assignment.size):
        raise JoinError(
            f"MPI says rank {world.rank} of {world.size}, {assignment.launcher} says "
            f"{assignment.rank} of "
            f"{assignment.size}. Is mpi4py built for the MPI whose mpirun started this?"
        )
    return Group(world)


def c10d_world(timeout: timedelta) -> C10d:
    """PyTorch's default process group, once it is formed, as a transport."""
    group = dist.group.WORLD
    assert group is not None
    store = PrefixStore("farandole", dist.distributed_c10d._get_default_store())
    return C10d(group, rank=group.rank(), size=group.size(), timeout=timeout, store=store)


def _form(
    assignment: RankAssignment, device: torch.device, ranks_per_gpu: int, timeout: timedelta
) -> None:
    """Finds the others and forms PyTorch's process group with them; on GPUs with NCCL too, if all
    ranks have it."""
    if assignment.one_host:
        stay_on_loopback()
    try:
        store = find_store(assignment, timeout)
        # The attempt is part of the keys: a worker that was started again must not find those of
        # its predecessor, and take a dead rank for one that is here.
        here = PrefixStore(f"arrived-{assignment.attempt}", store)
        able = device.type == "cuda" and nccl_serves(ranks_per_gpu)
        here.set(f"nccl-{assignment.rank}", "yes" if able else "no")
        require_all_ranks(here, assignment, timeout)
        keys = [f"nccl-{rank}" for rank in range(assignment.size)]
        # A rank that had NCCL alone would wait in it for the others.
        nccl = able and all(answer == b"yes" for answer in map(here.get, keys))
        if device.type == "cuda":
            store = store_for_nccl(assignment, store, timeout)
        show_error = sys.excepthook
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if nccl else "gloo",
            store=PrefixStore(f"world-{assignment.attempt}", store),
            rank=assignment.rank,
            world_size=assignment.size,
            timeout=timeout + NCCL_PATIENCE if nccl else timeout,
            device_id=device if nccl else None,
        )
    finally:
        forget_announcement(assignment)
    if assignment.launcher == "farandole":
        # torch now prefixes tracebacks with the rank; our launcher prefixes every line already.
        sys.excepthook = show_error


def leave(group: Group) -> None:
    """Ends the process group. Waits for no other rank."""
    record_leaving()
    group.close()
    if dist.is_initialized():
        dist.destroy_process_group()


def _adopt(assignment: RankAssignment) -> None:
    """The script called `init_process_group` itself: use that group if it is the same job's."""
    if (dist.get_rank(), dist.get_world_size()) != (assignment.rank, assignment.size):
        raise JoinError(
            f"torch.distributed is already initialised as rank {dist.get_rank()} of "
            f"{dist.get_world_size()}, but {assignment.launcher} says rank {assignment.rank} of "
            f"{assignment.size}. "
            "Call fd.init() instead of init_process_group()."
        )
