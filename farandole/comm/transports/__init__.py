"""What carries the bytes: threads of one process, shared memory, c10d, MPI, and hosts of these."""

from farandole.comm.transports.by_device import ByDevice
from farandole.comm.transports.c10d import C10d
from farandole.comm.transports.inprocess import Exchange, InProcess
from farandole.comm.transports.multihost import Hosts, over_hosts
from farandole.comm.transports.shm.transport import SharedMemory

__all__ = ["ByDevice", "C10d", "Exchange", "Hosts", "InProcess", "SharedMemory", "over_hosts"]
