"""conform.py TRANSPORT:SIZE…: the conformance suite in worlds of so many processes."""

from __future__ import annotations

import sys
from datetime import timedelta
from functools import partial

import psutil
from worlds import run_world

from farandole.comm import Group
from farandole.comm.transports import mpi
from farandole.testing.conformance import CHECKS, movement, run_checks
from farandole.worker.environment import is_loopback


def body(transport: str, group: Group) -> None:
    failures = run_checks(group)
    if group.transport.name == "mpi":
        mpi._MOST_BYTES = 100_000  # as if messages were too long for MPI
        failures += run_checks(group, movement.CHECKS)
    assert not failures, "\n".join(failures)
    heard = [
        assignment
        for assignment in psutil.Process().net_connections()
        if assignment.status == "LISTEN"
    ]
    assert all(is_loopback(assignment.laddr.ip) for assignment in heard), (
        f"listens on the network: {heard}"
    )
    group.close()
    if group.rank == 0:
        print(f"{transport} {group.size}: {len(CHECKS)} checks passed", flush=True)


if __name__ == "__main__":
    worlds = [world.split(":") for world in sys.argv[1:]]
    ends = [
        run_world(name, int(size), timedelta(seconds=100), partial(body, name))
        for name, size in worlds
    ]
    sys.exit(0 if all(ends) else 1)
