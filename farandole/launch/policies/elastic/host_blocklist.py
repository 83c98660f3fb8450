"""Which hosts are left out of an elastic job, because workers keep failing on them.

A worker that dies is replaced on its host: most hosts are not to blame. But where workers die three
times before the job has got anywhere, they would die for ever. Workers that die together, because
the host was restarted, count once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

LIMIT = 3


class Incident(NamedTuple):
    """What counts once: workers with ranks in one generation, or workers started together."""

    generation: int
    wave: int = 0


class HostBlocklist:
    """The incidents of each host since the job last got somewhere."""

    def __init__(self) -> None:
        self._incidents: dict[str, set[Incident]] = {}

    def note(self, host: str, incident: Incident) -> bool:
        """Says whether the host is left out because of it."""
        known = self._incidents.setdefault(host, set())
        before = len(known)
        known.add(incident)
        return before < LIMIT <= len(known)

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
        return {host: slots for host, slots in hosts.items() if not self.is_left_out(host)}

    def is_left_out(self, host: str) -> bool:
        return len(self._incidents.get(host, ())) >= LIMIT
