"""Where to listen, and which interface to use: loopback, unless a job has several hosts."""

from __future__ import annotations

import os
import socket
from collections.abc import MutableMapping
from datetime import timedelta
from typing import TYPE_CHECKING

from farandole.worker.environment import is_loopback

if TYPE_CHECKING:
    from torch.distributed import TCPStore


def serve_tcp_store(timeout: timedelta, address: str, port: int) -> TCPStore:
    """PyTorch's store, for ranks that have no token: it lets in everybody who reaches the port.

    It listens on every interface unless it is handed a socket that is bound, so we bind one to
    `address` ourselves.
    """
    from torch.distributed import TCPStore  # here: launchers, too, use this file, without torch

    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.listen(1024)
        # The store takes the descriptor over; `detach` keeps `with` from closing it under it.
        return TCPStore(
            address,
            port,
            is_master=True,
            timeout=timeout,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )


def reachable(address: str) -> str:
    """Where to listen so that whoever resolves `address` elsewhere gets here.

    A host's own name often stands for 127.0.1.1 in its own /etc/hosts; other hosts know better, so
    then it is every interface. Raises `OSError` when the name is unknown.
    """
    found = socket.gethostbyname(address)
    return "0.0.0.0" if is_loopback(found) and not is_loopback(address) else found


def stay_on_loopback(environ: MutableMapping[str, str] = os.environ) -> None:
    """Makes gloo and NCCL use the loopback interface, unless the user has chosen another."""
    interface = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    if interface is None:
        return
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        environ.setdefault(variable, interface)
