"""Which hosts an elastic job may use: those found, reached, and not left out for failures."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Protocol

from farandole.launch.messages import tell
from farandole.launch.policies.elastic.discovery import Discovery
from farandole.launch.policies.elastic.host_blocklist import HostBlocklist
from farandole.launch.policies.elastic.members import listed


class Admission(Protocol):
    """Says which hosts are fit, and looks at those again that were lost."""

    def is_fit(self, host: str) -> bool: ...

    def lost(self, host: str) -> str:
        """The connection to it has ended. Returns what follows from it, to be told."""


class UsableHosts:
    """`slots` are those of the hosts that can reach the launcher, left out or not."""

    def __init__(
        self,
        discovery: Discovery,
        reaches: Callable[[str], bool],
        admission: Admission | None = None,
        pause_seconds: float | None = None,
    ) -> None:
        self.slots: Mapping[str, int] = {}
        self.blocklist = HostBlocklist(pause_seconds)
        self.admission = admission
        self._discovery = discovery
        self._told: str | None = None  # what the discovery failed with
        self._reaches = reaches
        self._found: Mapping[str, int] = {}
        self._added = 0
        self._too_few_since: float | None = None

    def refresh(self) -> dict[str, int]:
        """The slots of each host that may be used now. Says when the hosts have changed."""
        found = self._discovery.hosts
        if found is not None and found != self._found:
            self._note(found)
        self._tell_problem()
        return self.blocklist.usable(self.slots)

    def left_out(self) -> list[str]:
        """Hosts on which no worker is started, for now or for good."""
        return [
            host
            for host in self.slots
            if self.blocklist.is_left_out(host)
            or not (self.admission is None or self.admission.is_fit(host))
        ]

    def take_added_slots(self) -> int:
        """How many have been added to those of the first time, since the last call."""
        added, self._added = self._added, 0
        return added

    def note_enough(self) -> None:
        """There are enough of them."""
        self._too_few_since = None

    def seconds_too_few(self) -> float:
        """For how long there have been too few, from the first call since there were enough."""
        now = time.monotonic()
        if self._too_few_since is None:
            self._too_few_since = now
        return now - self._too_few_since

    def problem(self) -> str | None:
        """Why the last discovery of hosts failed, if it did."""
        error = self._discovery.error
        return None if error is None else f"the last question for hosts failed ({error})"

    def _tell_problem(self) -> None:
        """Once for each: what was found before holds."""
        error = self._discovery.error
        said = None if error is None else str(error)
        if said is not None and said != self._told:
            tell(f"{said.rstrip('.')}. The job goes on with the hosts that it knows.")
        self._told = said

    def _note(self, found: Mapping[str, int]) -> None:
        if self._found:
            tell(f"the hosts are now {listed(found)}; they were {listed(self._found)}")
        reached = {host: slots for host, slots in found.items() if self._reaches(host)}
        if self._found:
            more = (slots - self.slots.get(host, 0) for host, slots in reached.items())
            self._added += sum(max(0, slots) for slots in more)
        self._found, self.slots = found, reached
        if len(self.slots) < len(found):
            tell(
                f"{', '.join(found.keys() - self.slots.keys())}: not used, because the job began "
                "on this host alone and listens on nothing else; with --network-interfaces it does"
            )
