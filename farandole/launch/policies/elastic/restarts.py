"""How often, and how soon, workers that failed are replaced."""

from __future__ import annotations

import time
from collections import deque

_RECENT_SECONDS = 10.0
_FIRST_PAUSE_SECONDS = 0.5
_LONGEST_PAUSE_SECONDS = 30.0


class Restarts:
    """`left` of them. After several failures in a row each further start waits twice as long.

    They are in a row if the first was less than `recent_seconds` ago.
    """

    def __init__(self, most: int, recent_seconds: float = _RECENT_SECONDS) -> None:
        self.most = most
        self.left = most
        self._recent_seconds = recent_seconds
        self._failed: deque[float] = deque()
        self._pause_ends = 0.0

    def note_failure(self, now: float | None = None) -> None:
        now = time.monotonic() if now is None else now
        self._failed.append(now)
        while self._failed[0] < now - self._recent_seconds:
            self._failed.popleft()
        pause = _FIRST_PAUSE_SECONDS * (2 ** (len(self._failed) - 1) - 1)  # none after the first
        self._pause_ends = now + min(pause, _LONGEST_PAUSE_SECONDS)

    def take(self, wanted: int, now: float | None = None) -> int:
        """How many of the `wanted` workers may be started now; they count."""
        now = time.monotonic() if now is None else now
        allowed = min(wanted, self.left) if now >= self._pause_ends else 0
        self.left -= allowed
        return allowed
