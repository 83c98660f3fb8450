"""What a DataLoader's process does first: it keeps its memory, and outlives signals to its rank.

Schedulers send SIGTERM to every process of a job, and launchers to whole process groups. A rank
that saves once more on SIGTERM must not lose its loading processes meanwhile: the DataLoader would
raise in the middle of the save. They end when the rank does, or is done with them.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from farandole.system.freed_memory import keep_freed_memory


@dataclass
class ProcessStart:
    """Takes the place of a `worker_init_fn`, and calls the user's own."""

    own: Callable[[int], Any] | None = None
    outlives_stop_signals: bool = False

    def __call__(self, worker: int) -> None:
        keep_freed_memory()  # batch after batch, it needs as much again
        if self.outlives_stop_signals:
            for number in (signal.SIGTERM, signal.SIGUSR1):
                signal.signal(number, signal.SIG_IGN)
        if self.own is not None:
            self.own(worker)
