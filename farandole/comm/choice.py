"""`auto`: which all-reduce for how many bytes.

Between ranks that share memory there is nothing to choose: the transport's own is fastest. Over a
network every schedule has a price, made of a link's α and β, and the cheapest is the candidate. The
other one is the transport's own, gloo's for one, whose price nobody can compute: both were tried at
a few sizes when the job started, and the winner at the nearest size is taken. What was measured is
the same on all ranks, so all choose the same.
"""

from __future__ import annotations

import functools
import math

from farandole.comm.transports.base import NATIVE, NativeWins, Transport
from farandole.errors import UserError, nearest
from farandole.schedule import ALGORITHMS, Link, build, cost_seconds

AUTO = "auto"


def choose(transport: Transport, nbytes: int, asked: str, *, cuda: bool = False) -> str:
    """The algorithm to run when `asked` was asked for: a schedule's name or `native`."""
    if asked != AUTO:
        check_algorithm(asked)
        return asked
    if cuda or transport.native_is_fastest:
        return NATIVE
    if native_wins_at(transport.native_wins, nbytes):
        return NATIVE
    return cheapest(transport.size, nbytes, transport.link)[0]


def native_wins_at(tried: NativeWins, nbytes: int) -> bool:
    """By the nearest size that was tried, in powers of two; of two as near, the larger."""
    if not tried:
        return False
    near = min(reversed(tried), key=lambda one: abs(math.log2(max(nbytes, 1) / one[0])))
    return near[1]


def cheapest(ranks: int, nbytes: int, link: Link) -> tuple[str, float]:
    """The schedule that takes least time between `ranks` ranks, each with a `link` to all others.

    And the seconds it takes. Of two that cost the same it is the one listed first.
    """
    # Rounded up to a power of two, so that one search serves many sizes.
    return _cheapest(ranks, 1 << max(nbytes - 1, 0).bit_length(), link, len(ALGORITHMS))


@functools.lru_cache(maxsize=1024)
def _cheapest(ranks: int, nbytes: int, link: Link, known: int) -> tuple[str, float]:
    """`known`: how many algorithms there are. One that is registered later is considered too."""
    flat = [name for name in ALGORITHMS if not ALGORITHMS[name].for_hosts]
    costs = {name: cost_seconds(_schedule(name, ranks), nbytes, link) for name in flat}
    name = min(costs, key=lambda name: costs[name])
    return name, costs[name]


_schedule = functools.lru_cache(maxsize=64)(build)


def check_algorithm(name: str) -> None:
    """Raises `UserError` unless there is an all-reduce of this name."""
    known = [*ALGORITHMS, NATIVE, AUTO]
    if name not in known:
        raise UserError(f"no all-reduce algorithm {name!r}. {nearest(name, known)}")
