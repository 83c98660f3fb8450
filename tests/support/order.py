"""Long test files first, so that at the end no worker of the suite waits for another.

`weights.json` has the seconds of the files that take longest, on one core; all others are short.
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
    loads = [0.0] * workers
    for name in sorted(
        files, key=weight, reverse=True
    ):  # a stable sort: the short keep their order
        least = loads.index(min(loads))
        stretches[least] += files[name]
        loads[least] += weight(name)
    # Equal in number, as pytest-xdist cuts them, they need not be: it moves what is left over.
    return [test for stretch in stretches for test in stretch]


def weight(file: str) -> float:
    return WEIGHTS.get(file, SHORT_SECONDS)
