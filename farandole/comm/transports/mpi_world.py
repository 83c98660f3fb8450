"""How MPI starts and ends: what it would do by itself suits a program that cannot lose a rank.

It waits for all ranks at both ends, without a time limit, and listens on the network even when all
of them share a host.
"""

from __future__ import annotations

import atexit
import faulthandler
import os
import sys
from collections.abc import MutableMapping
from datetime import timedelta
from typing import Any

from farandole.comm.transports.messages import PeerLost
from farandole.comm.transports.mpi import Mpi, Waits
from farandole.errors import JoinError, UserError
from farandole.topology import Topology


def mpi_world(timeout: timedelta, topology: Topology | None = None) -> Mpi:
    """This rank's end of a transport between all ranks that mpirun started.

    Without a topology, MPI is asked which host each rank is on. Raises `UserError` when mpi4py or
    MPI is not installed, and `JoinError` naming the ranks that do not come within `timeout`.
    """
    mpi = _initialise(timeout)
    if mpi.Query_thread() < mpi.THREAD_MULTIPLE:
        raise UserError(
            "MPI was initialised for one thread, but collectives also run in the background. "
            "Leave it to fd.init(), or ask for MPI.THREAD_MULTIPLE."
        )
    world = Mpi(mpi.COMM_WORLD, timeout)
    communicator, request = mpi.COMM_WORLD.Idup()  # so that our messages meet nobody else's
    try:
        waits = Waits(0)
        waits.add(request, world.others)
        world.finish(waits)
        transport = Mpi(communicator, timeout, topology)
        if topology is None:
            transport.topology = Topology.from_names(transport.share(mpi.Get_processor_name()))
    except PeerLost as waited_for:
        lost = world.blame(waited_for)
        raise JoinError(f"rank {world.rank} of {world.size} joins over MPI, but {lost}.") from lost
    atexit.register(_abort_after_an_error)
    return transport


def _initialise(timeout: timedelta) -> Any:
    """mpi4py's MPI module, after MPI_Init."""
    _stay_on_this_host()
    try:
        return wait_for_all_ranks(timeout)
    except (ImportError, RuntimeError) as error:
        raise UserError(
            f"the MPI transport needs mpi4py and an MPI library ({error}). Install them: "
            "pip install 'farandole[mpi]' and, on Debian, apt install openmpi-bin."
        ) from error


def wait_for_all_ranks(timeout: timedelta) -> Any:
    """Imports mpi4py's MPI. That calls MPI_Init, which returns when every rank has called it.

    Meanwhile the interpreter is locked, so nothing written in Python could end the wait. What can
    is a thread that writes a traceback, which ends in the name of this function, and then exits.
    """
    faulthandler.dump_traceback_later(timeout.total_seconds(), exit=True)
    try:
        from mpi4py import MPI
    finally:
        faulthandler.cancel_dump_traceback_later()
    return MPI


def _stay_on_this_host(environ: MutableMapping[str, str] = os.environ) -> None:
    """When all ranks share a host, Open MPI need not listen on the network; it would by default."""
    ranks = environ.get("OMPI_COMM_WORLD_SIZE")
    if ranks is not None and ranks == environ.get("OMPI_COMM_WORLD_LOCAL_SIZE"):
        environ.setdefault("OMPI_MCA_btl", "^tcp,ofi,openib,uct")
        environ.setdefault("OMPI_MCA_mtl", "^ofi")
        environ.setdefault("OMPI_MCA_pml", "^ucx,cm")


def _abort_after_an_error() -> None:
    """A rank that raised must not sit in MPI_Finalize while the others wait for it elsewhere."""
    if getattr(sys, "last_value", None) is not None:
        from mpi4py.run import set_abort_status

        set_abort_status(1)
