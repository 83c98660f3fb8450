"""How many CPU cores there are to share."""

from __future__ import annotations

import os


def usable_cores() -> int:
    """Those this process may run on: fewer than the machine has under taskset or a batch system."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def fair_share(workers: int) -> int:
    """The cores of each of `workers` processes that share the usable ones; at least one."""
    return max(1, usable_cores() // workers)
