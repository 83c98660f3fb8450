"""From a seat to a group: find the other ranks and form the process group with them.

store run by the agent    connect to it                                  (farandole run, torchrun)
one host, port known      rank 0 serves one on loopback; the others connect      (RANK set by hand)
one host, port unknown    rank 0 serves one on loopback and writes its port to a private file; the
                          others read it                                         (mpirun, srun -N1)
several hosts             rank 0 serves one on MASTER_ADDR; the others connect
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import stat
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore

from farandole.comm import (
    C10d,
    Exchange,
    Group,
    InProcess,
    Transport,
    TransportName,
    over_hosts,
)
from farandole.comm.calibration import calibrate
from farandole.comm.transport import PeerLost
from farandole.errors import JoinError
from farandole.launch.environment import Seat
from farandole.launch.failure import record_leaving
from farandole.launch.loopback import LOOPBACK, reachable, serve_store, stay_on_loopback
from farandole.topology import Topology
from farandole.variables import SERVER_KEY, SERVERS


def join(
    seat: Seat,
    device: torch.device,
    *,
    shared_gpu: bool,
    timeout: timedelta,
    transport: TransportName = "auto",
) -> Group:
    """This rank's end of the world group.

    Raises `JoinError` naming the ranks that did not arrive within `timeout`.
    """
    if os.environ.get(SERVERS):
        return _join_servers(seat, os.environ[SERVERS], timeout)
    if seat.size == 1:
        return Group(InProcess(Exchange(1, timeout), 0))
    if transport == "mpi":
        return _join_mpi(seat, device, timeout)
    nccl = device.type == "cuda" and not shared_gpu and dist.is_nccl_available()
    if dist.is_initialized():
        _adopt(seat)
    else:
        _form(seat, device if nccl else None, timeout)
    world = c10d_world(timeout)
    try:
        return Group(_best(world, device, transport))
    except PeerLost as waited_for:
        lost = world.blame(waited_for)
        raise JoinError(f"rank {seat.rank} of {seat.size} connects, but {lost}.") from lost


def _join_servers(seat: Seat, address: str, timeout: timedelta) -> Group:
    """By way of the parameter servers' registrar, which knows who lives: a dead rank is missed."""
    from farandole.server.roll import Roll  # few jobs need pyzmq
    from farandole.server.store import Store as Servers

    key_file = os.environ.get(SERVER_KEY)
    if not key_file:
        raise JoinError(f"{SERVERS}={address} is set, and {SERVER_KEY} (a file) is not.")
    late = seat.attempt > 0
    seconds = timeout.total_seconds()
    store = Servers(
        address,
        key_file,
        rank=seat.rank,
        timeout=seconds,
        late=late,
        job=seat.job,
        workers=seat.size,
    )
    roll = Roll(store, seat.rank, seat.size, timeout, late=late)
    roll.topology = Topology.from_names(roll.share(platform.node() or "localhost"))
    return Group(roll)


def _best(world: C10d, device: torch.device, transport: TransportName) -> Transport:
    """What carries the bytes between these ranks fastest, or what was asked for."""
    world.topology = Topology.from_names(world.share(platform.node() or "localhost"))
    if device.type == "cuda":
        return world
    found = world if transport == "c10d" else over_hosts(world, world.topology)
    if transport == "shm" and isinstance(found, C10d):
        raise JoinError(
            f"transport='shm' was asked for, and ranks on {world.topology} cannot share memory."
        )
    if found.name != "shm":  # there auto has nothing to choose
        found.link = calibrate(found)
    return found


def _join_mpi(seat: Seat, device: torch.device, timeout: timedelta) -> Group:
    """MPI throughout: no store, no sockets of ours."""
    if seat.launcher in ("farandole", "torchrun") or device.type == "cuda":
        raise JoinError(
            f"transport='mpi' is for ranks on CPUs that mpirun or srun started; these were started "
            f"by {seat.launcher} and compute on {device.type}. Leave the transport to 'auto'."
        )
    from farandole.comm.transports.mpi_world import mpi_world  # few jobs need it

    world = mpi_world(timeout)
    if (world.rank, world.size) != (seat.rank, seat.size):
        raise JoinError(
            f"MPI says rank {world.rank} of {world.size}, {seat.launcher} says {seat.rank} of "
            f"{seat.size}. Is mpi4py built for the MPI whose mpirun started this?"
        )
    return Group(world)


def c10d_world(timeout: timedelta) -> C10d:
    """PyTorch's default process group, once it is formed, as a transport."""
    group = dist.group.WORLD
    assert group is not None
    store = PrefixStore("farandole", dist.distributed_c10d._get_default_store())
    return C10d(group, rank=group.rank(), size=group.size(), timeout=timeout, store=store)


def _form(seat: Seat, device: torch.device | None, timeout: timedelta) -> None:
    """Finds the others and forms PyTorch's process group with them; on GPUs with NCCL too."""
    if seat.one_host:
        stay_on_loopback()
    try:
        store = _store(seat, timeout)
        _roll_call(PrefixStore(f"roll-{seat.attempt}", store), seat, timeout)
        show_error = sys.excepthook
        dist.init_process_group(
            "gloo" if device is None else "cpu:gloo,cuda:nccl",
            store=PrefixStore(f"world-{seat.attempt}", store),
            rank=seat.rank,
            world_size=seat.size,
            timeout=timeout,
            device_id=device,
        )
    finally:
        _forget_port_file(seat)
    if seat.launcher == "farandole":
        # torch now prefixes tracebacks with the rank; our launcher prefixes every line already.
        sys.excepthook = show_error


def leave(group: Group) -> None:
    """Ends the process group. Waits for no other rank."""
    record_leaving()
    group.close()
    if dist.is_initialized():
        dist.destroy_process_group()


def _adopt(seat: Seat) -> None:
    """The script called `init_process_group` itself: use that group if it is the same job's."""
    if (dist.get_rank(), dist.get_world_size()) != (seat.rank, seat.size):
        raise JoinError(
            f"torch.distributed is already initialised as rank {dist.get_rank()} of "
            f"{dist.get_world_size()}, but {seat.launcher} says rank {seat.rank} of {seat.size}. "
            "Call fd.init() instead of init_process_group()."
        )


def _store(seat: Seat, timeout: timedelta) -> Store:
    address, port = seat.address, seat.port
    if seat.agent_store:
        if address is None or port is None:
            raise JoinError(f"{seat.launcher} set no MASTER_ADDR and MASTER_PORT to connect to.")
        return _connect(address, port, timeout)
    if seat.one_host and seat.launcher != "torchrun":
        if seat.rank == 0:
            store = serve_store(timeout)
            _write_port_file(seat, store.port)
            return store
        return _connect(LOOPBACK, _read_port_file(seat, timeout), timeout)
    if address is None or port is None:
        raise JoinError(
            f"{seat.launcher} started {seat.size} ranks and nothing says where rank 0 is. "
            "Set MASTER_ADDR and MASTER_PORT for all ranks, for example "
            "mpirun -x MASTER_ADDR=$(hostname) -x MASTER_PORT=29500 …"
        )
    address = LOOPBACK if seat.one_host else address
    return _serve(address, port, timeout) if seat.rank == 0 else _connect(address, port, timeout)


def _serve(address: str, port: int, timeout: timedelta) -> TCPStore:
    try:
        return serve_store(timeout, reachable(address), port)
    except OSError as error:
        raise JoinError(
            f"rank 0 cannot listen at {address}:{port}: {error}. Set MASTER_ADDR to a name of its "
            "host and MASTER_PORT to a free port."
        ) from error


def _connect(address: str, port: int, timeout: timedelta) -> TCPStore:
    try:
        return TCPStore(address, port, is_master=False, timeout=timeout, wait_for_workers=False)
    except (RuntimeError, dist.DistError) as error:
        raise JoinError(
            f"no store answers at {address}:{port} within {timeout.total_seconds():g} s. "
            "Is rank 0 (or the launcher) still running, and can this host reach it?"
        ) from error


def _roll_call(store: Store, seat: Seat, timeout: timedelta) -> None:
    """Waits until every rank has come this far, and names those that have not."""
    store.set(f"here-{seat.rank}", "1")
    deadline = time.monotonic() + timeout.total_seconds()
    missing = [rank for rank in range(seat.size) if rank != seat.rank]
    while missing:
        left = deadline - time.monotonic()
        try:
            store.wait([f"here-{missing[0]}"], timedelta(seconds=max(left, 0.001)))
            missing.pop(0)
        except (RuntimeError, dist.DistError):
            missing = _still_missing(store, seat, missing)
            if missing:
                raise JoinError(
                    f"rank {seat.rank} waited {timeout.total_seconds():g} s for rank(s) {missing} "
                    f"of {seat.size} to call fd.init(). Did they fail before it? "
                    "(fd.init(timeout=…) allows more.)"
                ) from None


def _still_missing(store: Store, seat: Seat, missing: list[int]) -> list[int]:
    try:
        return [rank for rank in missing if not store.check([f"here-{rank}"])]
    except (RuntimeError, dist.DistError) as error:
        raise JoinError(
            f"rank {seat.rank} waited for rank {missing[0]} of {seat.size} to call fd.init() when "
            "rank 0 (or the launcher) ended, and with it the store. See its own output."
        ) from error


# The port file. Its folder belongs to this user alone, so nobody else can point ranks at a store
# of their own.


def _port_file(seat: Seat) -> Path:
    folder = Path(tempfile.gettempdir()) / f"farandole-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    private = stat.S_ISDIR(status.st_mode) and not status.st_mode & 0o077
    if status.st_uid != os.getuid() or not private:
        raise JoinError(f"{folder} is not a private folder of this user. Remove it and try again.")
    name = hashlib.sha256(f"{seat.launcher}/{seat.job}".encode()).hexdigest()[:16]
    return folder / f"{name}.json"


def _write_port_file(seat: Seat, port: int) -> None:
    path = _port_file(seat)
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    own = psutil.Process()
    content = {"port": port, "pid": own.pid, "started": own.create_time()}
    temporary.write_text(json.dumps(content))
    temporary.replace(path)


def _read_port_file(seat: Seat, timeout: timedelta) -> int:
    path = _port_file(seat)
    deadline = time.monotonic() + timeout.total_seconds()
    while time.monotonic() < deadline:
        port = _announced_port(path)
        if port is not None:
            return port
        time.sleep(0.01)
    raise JoinError(
        f"rank {seat.rank} waited {timeout.total_seconds():g} s for rank 0 to announce itself in "
        f"{path}. Did rank 0 fail before fd.init()?"
    )


def _announced_port(path: Path) -> int | None:
    """The port in the file. None if it was left by a job that crashed: its writer is gone, even if
    another process has the same id by now."""
    try:
        found = json.loads(path.read_text())
        writer = psutil.Process(int(found["pid"]))
        # The system's idea of when it booted, and with it this time, wanders a little.
        alive = abs(writer.create_time() - float(found["started"])) < 2.0
        return int(found["port"]) if alive else None
    except (FileNotFoundError, ValueError, KeyError, TypeError, psutil.Error):
        return None


def _forget_port_file(seat: Seat) -> None:
    if seat.one_host and seat.rank == 0 and not seat.agent_store and seat.launcher != "torchrun":
        _port_file(seat).unlink(missing_ok=True)
