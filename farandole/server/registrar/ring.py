"""Which servers hold a range: consistent hashing with virtual nodes, and with a bound on the load.

Every server stands at many points of a ring, every range at one. A range's chain is made of the
next servers that one meets, going round from there. When a server comes or goes, only the ranges
near its points change hands. Plain consistent hashing gives one server of two perhaps 22 of 32
ranges, and the slowest server sets the pace; so nobody gets more than a fair share rounded up, and
a range that meets a full server goes on to the next (Mirrokni, Thorup and Zadimoghaddam 2016).
"""

from __future__ import annotations

import bisect
import hashlib
from collections import Counter
from collections.abc import Sequence

POINTS = 64  # of each server; more make the shares of newcomers evener


def place(servers: Sequence[int], ranges: int, replicas: int) -> list[tuple[int, ...]]:
    """The chain of every range: who serves it, and then `replicas` successors.

    With fewer servers than that, as many as there are. The same for everyone who asks.
    """
    if not servers:
        return [()] * ranges
    points = sorted(
        (_hash(f"server {s} point {i}"), s) for s in set(servers) for i in range(POINTS)
    )
    hashes = [point for point, _ in points]
    length = min(replicas + 1, len(set(servers)))
    room = [Counter(dict.fromkeys(servers, -(-ranges // len(set(servers))))) for _ in range(length)]
    chains = []
    for range_ in range(ranges):
        begin = bisect.bisect(hashes, _hash(f"range {range_}"))
        met = list(dict.fromkeys(server for _, server in points[begin:] + points[:begin]))
        chain: list[int] = []
        for place in room:  # heads are shared out evenly, and so are the first successors, …
            free = [server for server in met if server not in chain]
            # One count of room for each place in the chain. A server may be the head of its share
            # only, and the successor in its share only, so that neither reads nor replication pile
            # up on one.
            server = next((server for server in free if place[server] > 0), free[0])
            place[server] -= 1
            chain.append(server)
        chains.append(tuple(chain))
    return chains


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")
