"""Where a worker of the suite was when it died of a signal, shown at the end of the suite.

pytest writes it to the worker's standard error, which stands thousands of lines above the summary,
or nowhere where only the end of the output is kept.
"""

from __future__ import annotations

import faulthandler
from pathlib import Path

_PATTERN = "crash-*.txt"
_SHOWN_LINES = 120


def keep_stacks(folder: Path, worker: str) -> None:
    """Of this process, if it dies. The file stays open as long as the process lives."""
    faulthandler.enable(file=(folder / _PATTERN.replace("*", worker)).open("w"))


def kept_stacks(folder: Path) -> list[tuple[str, list[str]]]:
    """The workers that died, and all threads' stacks, as far as there is room."""
    found = []
    for path in sorted(folder.glob(_PATTERN)):
        lines = path.read_text(errors="replace").splitlines()
        if lines:
            worker = path.stem.partition("-")[2]
            left = len(lines) - _SHOWN_LINES
            rest = [f"({left} more lines)"] if left > 0 else []
            found.append((worker, [*lines[:_SHOWN_LINES], *rest]))
    return found
