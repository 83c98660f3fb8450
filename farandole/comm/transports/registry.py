"""Transports by name: those that come with Farandole, and those that somebody has registered.

`auto` is shared memory inside a host and c10d between hosts. A transport of your own is connected
over one that reaches all ranks already, by c10d, as shared memory is:

    def connect(world: Transport) -> Transport: ...      # called on all ranks
    TRANSPORTS.register("mine", connect)                 # fd.init(transport="mine")
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from farandole.comm.transports.base import Transport
from farandole.errors import UserError, nearest
from farandole.registry import Registry

Connect = Callable[[Transport], Transport]

BUILT_IN: Final = ("auto", "shm", "c10d", "mpi")
TRANSPORTS: Registry[Connect] = Registry("transport")


def check_transport(name: str) -> str:
    """Raises `UserError` unless there is a transport of this name to ask for."""
    known = (*BUILT_IN, *TRANSPORTS)
    if name not in known:
        raise UserError(f"no transport {name!r}. {nearest(name, known)}")
    return name
