"""How bytes travel between ranks."""

from farandole.comm.arithmetic import Op
from farandole.comm.choice import TransportName, check_transport
from farandole.comm.group import Group
from farandole.comm.meter import Meter
from farandole.comm.queue import Handle
from farandole.comm.transports import ByDevice, C10d, Exchange, InProcess, SharedMemory, over_hosts
from farandole.comm.transports.base import Transport

__all__ = [
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
    "TransportName",
    "check_transport",
    "over_hosts",
]
