"""Which user of this host is at the other end of a TCP connection? The kernel's table says so."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

_TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
_ESTABLISHED = "01"
_MAPPED = "0000000000000000FFFF0000"  # what precedes an IPv4 address in the table of IPv6


def can_tell() -> bool:
    """Whether this system has such a table (Linux)."""
    return _TABLES[0].exists()


def peer_user(connection: socket.socket) -> int | None:
    """The user id of a peer of this host; None for one that is not, or is gone already.

    A socket whose process has closed it counts as root's in the table, without an inode.
    """
    here, there = connection.getsockname(), connection.getpeername()
    wanted = [_written(*there[:2]), _written(*here[:2])]
    for table, before in zip(_TABLES, ("", _MAPPED), strict=True):
        try:
            lines = table.read_text().splitlines()[1:]
        except OSError:
            continue
        ends = [before + end for end in wanted]
        for line in lines:
            words = line.split()
            if words[1:3] == ends and words[3] == _ESTABLISHED and words[9] != "0":
                return int(words[7])
    return None


def _written(address: str, port: int) -> str:
    """As the kernel writes an IPv4 address: a number in the machine's own order of bytes."""
    number = int.from_bytes(socket.inet_aton(address), sys.byteorder)
    return f"{number:08X}:{port:04X}"
