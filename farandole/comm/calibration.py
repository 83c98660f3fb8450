"""What a link costs: α and β, measured with a few messages at the start and remembered.

Two ranks send each other a small message, then larger ones, and back, until one takes so much
longer than the small one that the difference is the bytes' doing. Nothing here takes much longer
than a second. Where noise hides what a byte costs, or the time is up before, there is no β, and
none is made up: `auto` then goes by what links usually cost. What was measured between some hosts
is kept in a file for the next job there, unless the hosts are emulated ones.

From α and β follows which schedule should cost least. Whether that beats the transport's own
all-reduce, no formula says: ranks may share cores, or a library may do better than its parts. So
both are tried, by all ranks, at a few sizes.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import torch

from farandole.comm.choice import cheapest
from farandole.comm.transports.base import NATIVE, NativeWins, Transport
from farandole.environment import LINK
from farandole.errors import UserError
from farandole.schedule import Link

_SIZES = (64, 64 * 2**10, 2**20, 2**24)
_TELLING = 2.0  # times as long as the smallest message: then the bytes are what takes the time
_LARGE = 2**20  # the start of a transfer costs too little here to be taken for bandwidth
_SLOW_SECONDS = 0.05  # a message that takes so long is sent a few times only, and is large enough
_BUDGET_SECONDS = 1.0
_TRIED_BYTES = (2**12, 2**16, 2**20, 2**22)
_TRIALS = 6  # the first of which does not count
_KEEP_SECONDS = 86400.0


@dataclass(frozen=True)
class Unmeasured:
    """A link of which only the cost of a message is known; and the largest that was tried."""

    seconds_per_message: float
    largest_bytes: int
    largest_seconds: float

    @property
    def reason(self) -> str:
        """Why there is no cost of a byte."""
        return (
            f"{self.largest_bytes:,} bytes took {self.largest_seconds * 1000:.3g} ms and "
            f"{_SIZES[0]} bytes {self.seconds_per_message * 1000:.3g} ms, too close to tell what "
            "a byte costs"
        )


def measure(transport: Transport, first: int, second: int) -> Link | Unmeasured:
    """The link between two ranks, on all ranks: each of the two sends and receives at once."""
    found = ""
    if transport.rank in (first, second):
        peer = second if transport.rank == first else first
        found = json.dumps(asdict(_measure_with(transport, peer)))
    return read_measured(json.loads(transport.share(found)[first]))


def read_measured(entry: Mapping[str, Any]) -> Link | Unmeasured:
    """What `dataclasses.asdict` wrote."""
    return Unmeasured(**entry) if "largest_bytes" in entry else Link(**entry)


def link_between(transport: Transport, first: int, second: int) -> Link:
    """What to reckon with: as measured, or else what the transport's links usually cost."""
    found = measure(transport, first, second)
    return found if isinstance(found, Link) else transport.link


def _measure_with(transport: Transport, peer: int) -> Link | Unmeasured:
    small, spent = _SIZES[0], 0.0
    seconds = {small: _seconds(transport, peer, small, 9)}
    for size in _SIZES[1:]:
        # Both ranks know the same numbers, and so decide alike.
        slow = max(seconds.values()) > _SLOW_SECONDS
        repeats = 3 if slow else 9 if size < _LARGE else 5
        seconds[size] = _seconds(transport, peer, size, repeats)
        spent += repeats * seconds[size]
        telling = seconds[size] >= _TELLING * seconds[small]
        if telling and (size >= _LARGE or seconds[size] > _SLOW_SECONDS):
            return Link(seconds[small], (seconds[size] - seconds[small]) / size)
        if spent > _BUDGET_SECONDS:
            break
    return Unmeasured(seconds[small], max(seconds), seconds[max(seconds)])


def _seconds(transport: Transport, peer: int, size: int, repeats: int) -> float:
    """Of one exchange; the slower of the two ranks counts."""
    outgoing, incoming = torch.zeros(2, size, dtype=torch.uint8).unbind()
    times = []
    for _ in range(repeats):
        begin = perf_counter()
        transport.exchange([(peer, outgoing)], [(peer, incoming)])
        times.append(perf_counter() - begin)
    own = torch.tensor([statistics.median(times[1:])], dtype=torch.float64)
    theirs = torch.empty_like(own)
    transport.exchange([(peer, own)], [(peer, theirs)])
    return max(float(own), float(theirs))


def calibrate(
    transport: Transport, environ: Mapping[str, str] = os.environ, folder: Path | None = None
) -> None:
    """Sets the transport's link, between its hosts, or its ranks if all share a host, and for which
    sizes its own all-reduce wins.

    From the file of earlier jobs, or measured now; where that fails, the link is as the transport's
    usually are. `FARANDOLE_LINK` (rank 0's) sets the link; then nothing is measured, and schedules
    are chosen among by that alone.
    """
    hosts = transport.topology.hosts
    pair = (hosts[0].ranks[0], hosts[1].ranks[0] if len(hosts) > 1 else hosts[0].ranks[1])
    kept = CostCache(folder or cache_folder(environ), f"{transport.name} {transport.topology}")
    # The next emulated hosts have the same names, and a link of another rate.
    is_kept = not any(host.is_emulated for host in hosts)
    known = ""
    if transport.rank == 0:
        asked = environ.get(LINK)
        found = Costs(parse_link(asked), ()) if asked else kept.read() if is_kept else None
        age_seconds = None if asked else kept.age_seconds()
        known = json.dumps(found and [*found.as_json(), age_seconds])
    agreed = json.loads(transport.share(known)[0])
    if agreed is not None:
        *costs, transport.link_age_seconds = agreed
        transport.link, transport.native_wins = Costs.from_json(costs)
        return
    measured = measure(transport, *pair)
    if isinstance(measured, Link):
        transport.link = measured
    transport.native_wins = () if transport.native_is_fastest else try_native(transport)
    if isinstance(measured, Link) and is_kept and transport.rank == 0:
        kept.write(Costs(measured, transport.native_wins))


def try_native(transport: Transport) -> NativeWins:
    """The transport's own all-reduce against the cheapest schedule, by turns; the same on all."""
    wins: list[tuple[int, bool]] = []
    for nbytes in _TRIED_BYTES:
        data = torch.zeros(nbytes // 4)
        ways = {NATIVE: NATIVE, "schedule": cheapest(transport.size, nbytes, transport.link)[0]}
        times: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(_TRIALS):
            for way, algorithm in ways.items():
                transport.agree("calibration")  # all begin together
                begin = perf_counter()
                transport.all_reduce(data, "sum", algorithm, None)
                times[way].append(perf_counter() - begin)
        # The shortest: at the start of a job other processes come in between, and only lengthen.
        own = {way: min(found[1:]) for way, found in times.items()}
        everyones = [json.loads(text) for text in transport.share(json.dumps(own))]
        slowest = {way: max(theirs[way] for theirs in everyones) for way in ways}
        wins.append((nbytes, slowest[NATIVE] <= slowest["schedule"]))
        if max(slowest.values()) > _SLOW_SECONDS:
            break
    return tuple(wins)


def parse_link(text: str) -> Link:
    """`0.0002,1e-9`: seconds a message, seconds a byte."""
    try:
        alpha, beta = (float(part) for part in text.split(","))
    except ValueError:
        alpha = beta = -1.0
    if not (0 <= alpha < 3600 and 0 < beta < 1):
        raise UserError(
            f"{LINK}={text!r}: write seconds per message and seconds per byte, such as "
            "0.0002,8e-9 for 200 µs and 1 Gbit/s."
        )
    return Link(alpha, beta)


def cache_folder(environ: Mapping[str, str]) -> Path:
    base = environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "farandole"


class Costs(NamedTuple):
    """What was measured of a transport."""

    link: Link
    native_wins: NativeWins

    def as_json(self) -> list[Any]:
        return [self.link.seconds_per_message, self.link.seconds_per_byte, self.native_wins]

    @classmethod
    def from_json(cls, entry: Sequence[Any]) -> Costs:
        alpha, beta, wins = entry
        link = Link(float(alpha), float(beta))
        return cls(link, tuple((int(nbytes), bool(native)) for nbytes, native in wins))


class CostCache:
    """What one transport costs, in the file of those measured. One that is no use is as good as
    none."""

    def __init__(self, folder: Path, key: str) -> None:
        self._path = folder / "links.json"
        self._key = key

    def read(self) -> Costs | None:
        """None also where it is old: hosts get other networks under the same names."""
        entry, age_seconds = self._entries().get(self._key), self.age_seconds()
        try:
            if entry is not None and age_seconds is not None and 0 <= age_seconds < _KEEP_SECONDS:
                return Costs.from_json([entry["alpha"], entry["beta"], entry["native_wins"]])
        except (TypeError, KeyError, ValueError):
            pass
        return None

    def age_seconds(self) -> float | None:
        """How long ago it was measured; None where it was not."""
        try:
            return time.time() - float(self._entries()[self._key]["measured"])
        except (TypeError, KeyError, ValueError):
            return None

    def write(self, costs: Costs) -> None:
        entries = self._entries()
        alpha, beta, wins = costs.as_json()
        entries[self._key] = {
            "alpha": alpha,
            "beta": beta,
            "native_wins": wins,
            "measured": time.time(),
        }
        half = self._path.with_suffix(f".{os.getpid()}")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            half.write_text(json.dumps(entries, indent=1))
            half.replace(self._path)
        except OSError:  # then it is measured again next time
            with contextlib.suppress(OSError):
                half.unlink(missing_ok=True)

    def _entries(self) -> dict[str, dict[str, Any]]:
        try:
            found = json.loads(self._path.read_text())
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}
