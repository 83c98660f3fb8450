"""Long test files first, so that at the end no worker of the suite waits for another.

`weights.json` has the seconds of the files that take longest, by path; all others are short.
With `worksteal`, pytest-xdist gives each of its workers one stretch of the list of tests, and later
takes from the end of the longest what is left. So the list is made of stretches: the long files are
dealt to them, longest first, and the short ones follow. The tests of a file stay together, since
they share its fixtures.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

WEIGHTS: dict[str, float] = json.loads((Path(__file__).parent / "weights.json").read_text())
SHORT_SECONDS = 0.5  # a file without a weight

T = TypeVar("T")


def ordered(tests: Sequence[T], file_of: Callable[[T], str], workers: int) -> list[T]:
    files: dict[str, list[T]] = {}
    for test in tests:
        files.setdefault(file_of(test), []).append(test)
    stretches: list[list[T]] = [[] for _ in range(workers)]
    seconds = [0.0] * workers
    long = [name for name in files if weight(name) > SHORT_SECONDS]
    for name in sorted(long, key=weight, reverse=True):
        least = seconds.index(min(seconds))
        stretches[least] += files.pop(name)
        seconds[least] += weight(name)
    for short in files.values():  # pytest-xdist makes the stretches equal in number, not in time
        min(stretches, key=len).extend(short)
    return [test for stretch in stretches for test in stretch]


def weight(file: str) -> float:
    return WEIGHTS.get(file, SHORT_SECONDS)
