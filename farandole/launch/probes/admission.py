"""Which hosts of an elastic job are fit to take workers: looked at before their first one, and
again after they were lost.

    listed ──▶ looked at ──▶ fit ──▶ lost
                   │  ▲               │
                   ▼  └── after a ────┘      the pause doubles, unless the host was
                 unfit ── pause ──▶          fit for a while
                                             looked at again
Each look is in a thread of its own, so no host holds up the launcher or another host.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from farandole.launch.hosts import HERE
from farandole.launch.messages import tell
from farandole.launch.probes.session import ProbeSession

_FIRST_PAUSE_SECONDS = 1.0
_LONGEST_PAUSE_SECONDS = 300.0
_STEADY_SECONDS = 60.0  # a host that was fit for so long is looked at again soon
_STOP_SECONDS = 10.0

Look = Callable[[str, int, Callable[[Iterable[ProbeSession]], None]], Sequence[str]]
"""Looks at a host with so many slots, and returns what is wrong. Hands out its probes, which are
killed when the job ends before that."""


@dataclass
class _Standing:
    """Of one host."""

    is_fit: bool = False
    was_fit: bool = False  # workers may run there
    since: float = 0.0  # it is fit
    pause_seconds: float = _FIRST_PAUSE_SECONDS
    again_at: float = 0.0
    is_looked_at: bool = False
    told: str = ""


class HostAdmission:
    """`fit` are the hosts that were looked at before the job began."""

    def __init__(self, look: Look, fit: Iterable[str]) -> None:
        self._look = look
        self._lock = threading.Lock()
        self._is_stopped = False
        now = time.monotonic()
        self._standings = {host: _Standing(is_fit=True, was_fit=True, since=now) for host in fit}
        self._probes: dict[str, list[ProbeSession]] = {}
        self._threads: list[threading.Thread] = []

    def admitted(self, slots: Mapping[str, int]) -> dict[str, int]:
        """Of the listed hosts those that have ever been fit. Begins to look at the others.

        Call it often. A host that is no longer listed is forgotten.
        """
        now = time.monotonic()
        with self._lock:
            for host in [host for host in self._standings if host not in slots]:
                if not self._standings[host].is_looked_at:
                    del self._standings[host]
            for host, count in slots.items():
                standing = self._standings.setdefault(host, _Standing(is_fit=host == HERE))
                standing.was_fit |= host == HERE
                due = not standing.is_fit and now >= standing.again_at
                if due and not standing.is_looked_at and not self._is_stopped:
                    standing.is_looked_at = True
                    self._begin(host, count)
            return {host: count for host, count in slots.items() if self._standings[host].was_fit}

    def is_fit(self, host: str) -> bool:
        with self._lock:
            standing = self._standings.get(host)
            return standing is None or standing.is_fit  # one that is forgotten gets no workers

    def lost(self, host: str) -> str:
        """The connection to it has ended. Returns what follows from it, to be told."""
        with self._lock:
            standing = self._standings.get(host)
            if standing is None or host == HERE:
                return ""
            if standing.is_fit:
                now = time.monotonic()
                steady = now - standing.since > _STEADY_SECONDS
                standing.is_fit, standing.told = False, ""
                _postpone(standing, _FIRST_PAUSE_SECONDS if steady else standing.pause_seconds)
            return f"; {host} is left out until it answers again"

    def stop(self) -> None:
        """The job is over: gives up what is under way, and waits for its end."""
        with self._lock:
            self._is_stopped = True
            for probes in self._probes.values():
                for probe in probes:
                    probe.kill()
        deadline = time.monotonic() + _STOP_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _begin(self, host: str, slots: int) -> None:
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        thread = threading.Thread(
            target=self._look_at, args=(host, slots), name=f"look at {host}", daemon=True
        )
        self._threads.append(thread)
        thread.start()

    def _look_at(self, host: str, slots: int) -> None:
        try:
            wrong = list(self._look(host, slots, lambda probes: self._hold(host, probes)))
        except Exception as error:  # whatever it is, it must not leave the host looked at for ever
            wrong = [str(error)]
        with self._lock:
            self._probes.pop(host, None)
            standing = self._standings[host]
            standing.is_looked_at = False
            if self._is_stopped:
                return
            said = "\n".join(wrong)
            if not said:
                if standing.was_fit:
                    tell(f"host {host} answers again")
                standing.is_fit = standing.was_fit = True
                standing.since = time.monotonic()
                return
            _postpone(standing, standing.pause_seconds)
            if said != standing.told:
                tell(f"{said}\nHost {host} is left out, and looked at again from time to time.")
            standing.told = said

    def _hold(self, host: str, probes: Iterable[ProbeSession]) -> None:
        with self._lock:
            self._probes[host] = list(probes)
            if self._is_stopped:
                for probe in self._probes[host]:
                    probe.kill()


def _postpone(standing: _Standing, pause: float) -> None:
    standing.again_at = time.monotonic() + pause
    standing.pause_seconds = min(2 * pause, _LONGEST_PAUSE_SECONDS)
