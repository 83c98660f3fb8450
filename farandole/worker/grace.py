"""How long workers have between SIGTERM and SIGKILL, to save once more and to leave in order."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from farandole.environment import GRACE
from farandole.errors import UserError

DEFAULT_SECONDS = 30.0
"""TorchElastic's, and Slurm's KillWait."""

APART_SECONDS = 2.0
"""A second signal that comes sooner is the same request: schedulers send it to every process of a
job, and the launcher passes it on to its workers."""


@dataclass
class Grace:
    """Begins when it is made. Ends early when one more signal is `received` by the launcher."""

    seconds: float = DEFAULT_SECONDS
    received: Sequence[str] = ()
    _began: float = field(default_factory=time.monotonic)
    _before: int | None = None  # signals within the first seconds

    def is_over(self) -> bool:
        passed = time.monotonic() - self._began
        # The count begins anew until the first seconds are over, so that copies of the first signal
        # are not taken for a second request.
        if passed < APART_SECONDS:
            self._before = None
        elif self._before is None:
            self._before = len(self.received)
        again = self._before is not None and len(self.received) > self._before
        return passed > self.seconds or again


def grace_seconds(environ: Mapping[str, str]) -> float:
    """In a worker: as its launcher, or the user, says. Raises `UserError` for what is no time."""
    said = environ.get(GRACE)
    if not said:
        return DEFAULT_SECONDS
    try:
        seconds = float(said)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise UserError(f"{GRACE}={said!r} is no number of seconds above 0.")
    return seconds
