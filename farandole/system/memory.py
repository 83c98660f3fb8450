"""The memory of this process."""

from __future__ import annotations

import resource
import sys


def peak_process_bytes() -> int:
    """The most that was resident since it began."""
    unit_bytes = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit_bytes
