"""`race.json`: what a race is and which of its runs are over, to resume it and to draw it again.

It is written whole when the race begins and after every run. A run that is not in it was not
finished, and is run again from its beginning.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from farandole.errors import UserError
from farandole.files import write_whole
from farandole.race.runner import Entry, RaceConfig
from farandole.report.history import read_history
from farandole.report.lane import Lane, Outcome
from farandole.report.metrics import FILE_NAME

NAME = "race.json"
_FORMAT = 1


@dataclass(frozen=True)
class RunRecord:
    """One run that is over. `number` is its lane's, from 1."""

    number: int
    seed: int
    folder: str
    outcome: Outcome
    problem: str = ""
    command: str = ""
    budget_seconds: float | None = None  # that it was given


@dataclass(frozen=True)
class RaceRecord:
    """`settings` are options that must be the same for all lanes, by their names."""

    command: tuple[str, ...]
    entries: tuple[Entry, ...]
    seeds: tuple[int, ...]
    target: str | None
    settings: dict[str, Any] = field(default_factory=dict)
    facts: dict[str, str] = field(default_factory=dict)
    runs: tuple[RunRecord, ...] = ()
    price: float | None = None  # of a worker-hour

    def find(self, number: int, seed: int) -> RunRecord | None:
        return next((run for run in self.runs if (run.number, run.seed) == (number, seed)), None)

    def with_run(self, run: RunRecord) -> RaceRecord:
        """Replaces an earlier one of the same lane and seed."""
        others = (r for r in self.runs if (r.number, r.seed) != (run.number, run.seed))
        return replace(self, runs=(*others, run))

    def write(self, folder: Path) -> None:
        text = json.dumps({"format": _FORMAT, **asdict(self)}, indent=1, ensure_ascii=False)
        write_whole(folder / NAME, text.encode("utf-8", "replace"))

    def lane(self, folder: Path, run: RunRecord) -> Lane:
        """The run as the report sees it, from what it has logged."""
        entry = self.entries[run.number - 1]
        path = folder / run.folder / FILE_NAME
        history = read_history(path) if path.is_file() else None
        lane = RaceConfig(self.command, folder, run.seed, price=self.price).lane(entry)
        lane = replace(
            lane,
            outcome=run.outcome,
            problem=run.problem,
            command=run.command,
            folder=folder / run.folder,
        )
        return lane if history is None else replace(lane, history=history)

    def lanes(self, folder: Path) -> list[Lane]:
        """All runs that are over: lane by lane, as they were given, and by seed."""
        ordered = sorted(self.runs, key=lambda run: (run.number, run.seed))
        return [self.lane(folder, run) for run in ordered]


def read_record(folder: Path) -> RaceRecord:
    """Raises `UserError` where there is no race, or its record cannot be read."""
    path = folder / NAME
    try:
        found = json.loads(path.read_text())
        if found.pop("format") != _FORMAT:
            raise ValueError("another version of Farandole has written it")
        return RaceRecord(
            command=tuple(map(str, found["command"])),
            entries=tuple(Entry(**entry) for entry in found["entries"]),
            seeds=tuple(map(int, found["seeds"])),
            target=found["target"],
            settings=dict(found["settings"]),
            facts=dict(found["facts"]),
            runs=tuple(RunRecord(**run) for run in found["runs"]),
            price=found["price"],
        )
    except FileNotFoundError:
        raise UserError(
            f"{folder} has no {NAME}: it is not the folder of a race. Races are in runs/race-…"
        ) from None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(f"{path} cannot be read: {error!r}.") from None


def is_running(folder: Path) -> bool:
    """Whether a race is running in it, on this machine."""
    try:
        handle = os.open(folder / ".lock", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(handle)
    return False


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Raises `UserError` while another race runs in the same folder."""
    handle = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(f"another race is running in {folder}. Wait for its end.") from None
        yield
    finally:
        os.close(handle)
