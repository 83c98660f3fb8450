"""Where the ranks of a job find each other: a store that all of them reach.

our launcher              connect to its store: a Unix socket, or TCP with a token
torchrun's agent          connect to its TCPStore
one host, no such store   rank 0 serves one on a Unix socket and writes its path to a file in a
                          private folder; the others read it       (mpirun, srun -N1, RANK by hand)
several hosts             rank 0 serves one on MASTER_ADDR; the others connect. With FARANDOLE_TOKEN
                          it is ours, else PyTorch's TCPStore, which asks nobody who he is
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import Store, TCPStore

from farandole.errors import JoinError
from farandole.worker.announcement import Announcement
from farandole.worker.environment import RankAssignment
from farandole.worker.loopback import reachable, serve_tcp_store
from farandole.worker.store.address import StoreAddress, users_token
from farandole.worker.store.client import StoreClient
from farandole.worker.store.hosted import HostedStore


def find_store(
    assignment: RankAssignment, timeout: timedelta, environ: Mapping[str, str] = os.environ
) -> Store:
    """Connects to the job's store, or serves it. Raises `JoinError` when there is none."""
    if assignment.store is not None:
        return connect_store(assignment.store, timeout)
    address, port = assignment.address, assignment.port
    if assignment.agent_store:
        if address is None or port is None:
            raise JoinError(
                f"{assignment.launcher} set no MASTER_ADDR and MASTER_PORT to connect to."
            )
        return _connect_tcp(address, port, timeout)
    if assignment.one_host:
        return _meet_here(assignment, timeout)
    if address is None or port is None:
        raise JoinError(
            f"{assignment.launcher} started {assignment.size} ranks and nothing says where rank 0 "
            "is. "
            "Set MASTER_ADDR and MASTER_PORT for all ranks, for example "
            "mpirun -x MASTER_ADDR=$(hostname) -x MASTER_PORT=29500 …"
        )
    token = users_token(environ)
    try:
        if assignment.rank == 0 and token is not None:
            return HostedStore(timeout, host=reachable(address), port=port, token=token)
        if assignment.rank == 0:
            return serve_tcp_store(timeout, reachable(address), port)
    except OSError as error:
        raise JoinError(
            f"rank 0 cannot listen at {address}:{port}: {error}. Set MASTER_ADDR to a name of its "
            "host and MASTER_PORT to a free port."
        ) from error
    if token is not None:
        return connect_store(StoreAddress(None, address, port, token), timeout)
    return _connect_tcp(address, port, timeout)


def connect_store(address: StoreAddress, timeout: timedelta) -> StoreClient:
    """Raises `JoinError` where none of ours answers."""
    try:
        return StoreClient(address, timeout).keep()
    except dist.DistError as error:
        raise JoinError(
            f"no store answers at {address} within {timeout.total_seconds():g} s: {error}. "
            "Is rank 0 (or the launcher) still running, and can this host reach it?"
        ) from error


def _meet_here(assignment: RankAssignment, timeout: timedelta) -> Store:
    announcement = Announcement(assignment)
    if assignment.rank != 0:
        return connect_store(StoreAddress(announcement.read(timeout)), timeout)
    path = announcement.new_socket()
    try:
        store = HostedStore(timeout, path)
    except OSError as error:
        raise JoinError(
            f"rank 0 cannot listen at {path}: {error}. Set TMPDIR to a folder of a local disk, the "
            "same for all ranks."
        ) from error
    # Written when the socket listens: a rank that reads the file can connect at once.
    announcement.write(path)
    return store


def store_for_nccl(assignment: RankAssignment, store: Store, timeout: timedelta) -> Store:
    """The same store for NCCL, whose threads use it as long as the process lives.

    They should not have to wait for Python. So where the launcher serves `store`, it is PyTorch's
    own client of it: on one host the kernel tells the launcher who connects; from another host it
    is let in because `store` has shown the token before.
    """
    if assignment.store is None or assignment.address is None or assignment.port is None:
        return store
    return _connect_tcp(assignment.address, assignment.port, timeout)


def _connect_tcp(address: str, port: int, timeout: timedelta) -> TCPStore:
    try:
        return TCPStore(address, port, is_master=False, timeout=timeout, wait_for_workers=False)
    except (RuntimeError, dist.DistError) as error:
        raise JoinError(
            f"no store answers at {address}:{port} within {timeout.total_seconds():g} s. "
            "Is rank 0 (or the launcher) still running, and can this host reach it?"
        ) from error


def forget_announcement(assignment: RankAssignment) -> None:
    """All ranks have come, or nobody waits for them any more."""
    if (
        assignment.store is None
        and not assignment.agent_store
        and assignment.one_host
        and assignment.rank == 0
    ):
        Announcement(assignment).remove()


def require_all_ranks(
    store: Store, assignment: RankAssignment, timeout: timedelta, by: str = "fd.init()"
) -> None:
    """Waits until every rank has come this far, and names those that have not. `by` is the call
    that they have not made."""
    # Without this, ranks that never come are found out inside `init_process_group`, which cannot
    # say who is missing.
    store.set(f"here-{assignment.rank}", "1")
    others = [rank for rank in range(assignment.size) if rank != assignment.rank]
    try:
        store.wait([f"here-{rank}" for rank in others], timeout)
    except (RuntimeError, dist.DistError):
        # A rank may have come between the end of the wait and this look. Then nobody is missing,
        # and the join goes on.
        missing = _still_missing(store, assignment, others, by)
        if missing:
            raise JoinError(
                f"rank {assignment.rank} waited {timeout.total_seconds():g} s for rank(s) "
                f"{missing} "
                f"of {assignment.size} to call {by}. Did they fail before it? "
                "(A longer timeout allows more.)"
            ) from None


def _still_missing(
    store: Store, assignment: RankAssignment, missing: list[int], by: str
) -> list[int]:
    try:
        return [rank for rank in missing if not store.check([f"here-{rank}"])]
    except (RuntimeError, dist.DistError) as error:
        raise JoinError(
            f"rank {assignment.rank} waited for rank {missing[0]} of {assignment.size} to call "
            f"{by} when "
            "rank 0 (or the launcher) ended, and with it the store. See its own output."
        ) from error
