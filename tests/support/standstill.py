"""To see that someone waits, without waiting for a while oneself.

A test that nobody goes on must not take a slow one for one that waits. A process that has something
to do is runnable, also while the system lets it do nothing; one that waits sleeps. So it is looked
at, again and again, until it has been asleep so many times in a row.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path

LOOKS = 40
PATIENCE_SECONDS = 300.0


def wait_until_asleep(pid: int, threads: Iterable[int] | None = None) -> None:
    """Until these threads of the process, by their native ids, sleep; None: all that it has."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    in_a_row = 0
    while in_a_row < LOOKS:
        assert time.monotonic() < deadline, f"process {pid} never waits"
        tasks = Path(f"/proc/{pid}/task")
        looked_at = [int(task.name) for task in tasks.iterdir()] if threads is None else threads
        asleep = all(_state(tasks / str(task)) == "S" for task in looked_at)
        in_a_row = in_a_row + 1 if asleep else 0
        time.sleep(0.002)  # lets the others run: threads of this process, and processes of one core


def _state(task: Path) -> str:
    return (task / "stat").read_text().rpartition(")")[2].split()[0]
