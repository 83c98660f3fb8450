"""Names, addresses and interfaces: which are this host's, and which lead to another one."""

from __future__ import annotations

import platform
import socket
from collections.abc import Sequence

import psutil

from farandole.errors import UserError
from farandole.worker.environment import is_loopback

_ANY_PORT = 9  # to ask the system for a route nothing is sent


def is_here(host: str) -> bool:
    """Whether a name or an address is this host's own. One that nobody knows is another's."""
    if is_loopback(host) or host in _own_names():
        return True
    try:
        address = socket.gethostbyname(host)
    except OSError:  # perhaps ssh knows it, from its own settings
        return False
    return is_loopback(address) or address in _own_addresses()


def _own_names() -> set[str]:
    name = platform.node()
    return {name, name.partition(".")[0], socket.getfqdn()}


def _own_addresses() -> set[str]:
    return {entry.address for entries in psutil.net_if_addrs().values() for entry in entries}


def address_for(others: Sequence[str], interfaces: Sequence[str] = ()) -> str:
    """The address of this host at which `others` can reach it, or that of a given interface.

    Raises `UserError` when there is none.
    """
    return _address_of(interfaces) if interfaces else _address_towards(others[0])


def _address_of(interfaces: Sequence[str]) -> str:
    known = psutil.net_if_addrs()
    for name in interfaces:
        for entry in known.get(name, ()):
            if entry.family == socket.AF_INET:
                return entry.address
    raise UserError(
        f"no network interface {' or '.join(interfaces)} with an IPv4 address is here. There are: "
        f"{', '.join(sorted(known))}."
    )


def _address_towards(host: str) -> str:
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, _ANY_PORT))
            return str(probe.getsockname()[0])
    except OSError as error:
        raise UserError(
            f"no way leads from here to host {host}: {error}. Check the name, or name the "
            "interface that the hosts share: --network-interfaces eth0"
        ) from error


def interface_towards(address: str) -> str | None:
    """The interface by which this host reaches `address`; None when the system does not say."""
    try:
        own = _address_towards(address)
    except UserError:
        return None
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address == own for entry in entries):
            return name
    return None
