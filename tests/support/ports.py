"""Ports that stay free until a test uses them.

The system hands out ports from 32768 on: to outgoing connections, and to sockets that bind port 0.
One of these that was free a moment ago may belong to another test when it is used. Below that range
nobody takes a port without asking for its number.
"""

from __future__ import annotations

import random
import socket

_FIRST, _LAST = 20_000, 32_000  # above what services usually listen on
_chosen = random.SystemRandom()  # tests seed the other generator, all with the same number


def find_free_port() -> int:
    while True:
        port = _chosen.randint(_FIRST, _LAST)
        with socket.socket() as probe:
            try:
                probe.bind(("", port))  # on all interfaces: servers of tests listen on any
            except OSError:
                continue
            return port
