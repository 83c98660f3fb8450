"""What the launcher itself has to say, on standard error."""

from __future__ import annotations

import contextlib
import sys


def tell(line: str) -> None:
    """One line, marked as the launcher's own."""
    write_error(f"farandole: {line}\n")


def write_error(text: str) -> None:
    """In one piece, so that no worker's line gets into it."""
    with contextlib.suppress(OSError, ValueError):  # nobody reads any more; the job goes on
        sys.stderr.write(text)
        sys.stderr.flush()
