"""How bytes travel between ranks."""

from farandole.comm.arithmetic import Op
from farandole.comm.group import Group
from farandole.comm.meter import Meter
from farandole.comm.queue import Handle
from farandole.comm.transports.base import Transport
from farandole.comm.transports.by_device import ByDevice
from farandole.comm.transports.c10d import C10d
from farandole.comm.transports.inprocess import Exchange, InProcess
from farandole.comm.transports.multihost import over_hosts
from farandole.comm.transports.registry import TRANSPORTS, check_transport
from farandole.comm.transports.shm.transport import SharedMemory

__all__ = [
    "TRANSPORTS",
    "ByDevice",
    "C10d",
    "Exchange",
    "Group",
    "Handle",
    "InProcess",
    "Meter",
    "Op",
    "SharedMemory",
    "Transport",
    "check_transport",
    "over_hosts",
]
