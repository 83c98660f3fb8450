"""A folder that no other run has: two runs that start in the same second must not share one."""

from __future__ import annotations

import contextlib
import itertools
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Claim:
    """The folder `parent/name`, made for one run. None of it is there where nothing can be made."""

    parent: Path
    name: str
    made_parent: bool = False

    def release(self) -> None:
        """Removes the folder if nothing was written to it, and its parent if that is ours too."""
        with contextlib.suppress(OSError):  # it is not empty
            (self.parent / self.name).rmdir()
            if self.made_parent:
                self.parent.rmdir()


def claim(parent: Path, name: str) -> Claim:
    """Makes `parent/name`, or the first of `name-2`, `name-3`, … that nobody else has made.

    A folder that cannot be made is no error yet: the run may never write anything.
    """
    made_parent = not parent.exists()
    for number in itertools.count(1):
        tried = name if number == 1 else f"{name}-{number}"
        try:
            _make(parent / tried)
        except FileExistsError:
            if (parent / tried).exists():
                continue
            return Claim(parent, tried)  # the parent is a file
        except OSError:
            return Claim(parent, tried)
        return Claim(parent, tried, made_parent)
    raise AssertionError("numbers do not end")


def _make(folder: Path) -> None:
    """Raises `FileExistsError` when it is there already: only one of many succeeds."""
    while True:
        folder.parent.mkdir(parents=True, exist_ok=True)
        try:
            folder.mkdir()
        except FileNotFoundError:  # another run has just released the parent
            continue
        return
