"""Which hosts are left out of an elastic job, because workers keep failing on them.

A worker that dies is replaced on its host: most hosts are not to blame. But where workers die three
times before the job has got anywhere, they would die for ever. Workers that die together, because
the host was restarted, count once. Where there is a pause, the host gets another chance after it;
the next failure then leaves it out for twice as long.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import NamedTuple

LIMIT = 3
_LONGEST_PAUSE_SECONDS = 3600.0


class Incident(NamedTuple):
    """What counts once: workers with ranks in one generation, or workers started together."""

    generation: int
    wave: int = 0


class HostBlocklist:
    """The incidents of each host since the job last got somewhere.

    `pause_seconds`: for how long a host is left out at first; None: for good.
    """

    def __init__(self, pause_seconds: float | None = None) -> None:
        self._first_pause = pause_seconds
        self._incidents: dict[str, set[Incident]] = {}
        self._pauses: dict[str, tuple[float, float]] = {}  # the last one, and when it ends

    def note(self, host: str, incident: Incident, now: float | None = None) -> bool:
        """Says whether the host is left out because of it."""
        if self.is_left_out(host, now):
            return False
        known = self._incidents.setdefault(host, set())
        before = len(known)
        known.add(incident)
        if len(known) < LIMIT or len(known) == before:
            return False
        if self._first_pause is not None:
            last, _ = self._pauses.get(host, (self._first_pause / 2, 0.0))
            pause = min(2 * last, _LONGEST_PAUSE_SECONDS)
            self._pauses[host] = pause, _now(now) + pause
        return True

    def pause_seconds(self, host: str) -> float | None:
        """For how long it was left out last; None: for good."""
        return self._pauses[host][0] if host in self._pauses else None

    def forgive(self, generation: int) -> None:
        """It has reached a commit: forgets what happened before it, except where it was too much.

        What happens during it is not forgotten: it may commit and commit while workers on a new
        host cannot even start.
        """
        for host, known in self._incidents.items():
            if not self.is_left_out(host):
                known -= {incident for incident in known if incident.generation < generation}

    def usable(self, hosts: Mapping[str, int]) -> dict[str, int]:
        """Without those left out. Forgets who is not listed: who comes back gets another chance."""
        self._incidents = {host: known for host, known in self._incidents.items() if host in hosts}
        self._pauses = {host: pause for host, pause in self._pauses.items() if host in hosts}
        return {host: slots for host, slots in hosts.items() if not self.is_left_out(host)}

    def is_left_out(self, host: str, now: float | None = None) -> bool:
        if len(self._incidents.get(host, ())) < LIMIT:
            return False
        return self._first_pause is None or _now(now) < self._pauses[host][1]


def _now(given: float | None) -> float:
    return time.monotonic() if given is None else given
