"""Where the ranks of a job find each other: a store that all of them reach.

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
import stat
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import psutil
import torch.distributed as dist
from torch.distributed import Store, TCPStore

from farandole.errors import JoinError
from farandole.launch.environment import Seat
from farandole.launch.loopback import LOOPBACK, reachable, serve_store


def find_store(seat: Seat, timeout: timedelta) -> Store:
    """Connects to the job's store, or serves it. Raises `JoinError` when there is none."""
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


def roll_call(store: Store, seat: Seat, timeout: timedelta, by: str = "fd.init()") -> None:
    """Waits until every rank has come this far, and names those that have not. `by` is the call
    that they have not made."""
    store.set(f"here-{seat.rank}", "1")
    deadline = time.monotonic() + timeout.total_seconds()
    missing = [rank for rank in range(seat.size) if rank != seat.rank]
    while missing:
        left = deadline - time.monotonic()
        try:
            store.wait([f"here-{missing[0]}"], timedelta(seconds=max(left, 0.001)))
            missing.pop(0)
        except (RuntimeError, dist.DistError):
            missing = _still_missing(store, seat, missing, by)
            if missing:
                raise JoinError(
                    f"rank {seat.rank} waited {timeout.total_seconds():g} s for rank(s) {missing} "
                    f"of {seat.size} to call {by}. Did they fail before it? "
                    "(A longer timeout allows more.)"
                ) from None


def _still_missing(store: Store, seat: Seat, missing: list[int], by: str) -> list[int]:
    try:
        return [rank for rank in missing if not store.check([f"here-{rank}"])]
    except (RuntimeError, dist.DistError) as error:
        raise JoinError(
            f"rank {seat.rank} waited for rank {missing[0]} of {seat.size} to call {by} when "
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


def forget_port_file(seat: Seat) -> None:
    if seat.one_host and seat.rank == 0 and not seat.agent_store and seat.launcher != "torchrun":
        _port_file(seat).unlink(missing_ok=True)
