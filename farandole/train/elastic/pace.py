"""Which worker is much slower than the others, for long."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

TIMES_SLOWER = 3.0
FOR_SECONDS = 60.0
_SHARE = 0.1  # of a new step in the running mean


class Pace:
    """Running means of what a step costs each worker."""

    def __init__(self, members: Sequence[int]) -> None:
        self._members = members
        self._means: list[float] | None = None
        self._slow_since: dict[int, float] = {}
        self._named: set[int] = set()

    def note(self, seconds: Sequence[float], now: float | None = None) -> int | None:
        """What one more step has cost each rank. Returns a worker that is to be named, once."""
        now = time.monotonic() if now is None else now
        if self._means is None:
            self._means = list(seconds)
        pairs = zip(self._means, seconds, strict=True)
        self._means = [(1 - _SHARE) * mean + _SHARE * new for mean, new in pairs]
        typical = statistics.median(self._means)
        for worker, mean in zip(self._members, self._means, strict=True):
            if mean < TIMES_SLOWER * typical:
                self._slow_since.pop(worker, None)
                self._named.discard(worker)
                continue
            since = now - self._slow_since.setdefault(worker, now)
            if since >= FOR_SECONDS and worker not in self._named:
                self._named.add(worker)
                return worker
        return None
