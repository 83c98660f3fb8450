"""Reading `metrics.jsonl` back: what one run logged, as plain frozen data.

A reader must live with what a writer leaves behind: a last line that is still being written, a
line torn by a crash and then buried under a resumed run, a second `start`. None of these may cost
the user the rest of the numbers, so damage is collected with its line number and shown, not raised.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from farandole.errors import UserError

MOST = 1e20  # no run counts this far: a line that says so is damaged


@dataclass(frozen=True)
class Counters:
    """What a run has spent so far. Samples count all ranks; waiting and bytes are rank 0's.

    Energy is that of rank 0's host; None where the machine does not tell.
    """

    time_seconds: float = 0.0
    samples: int = 0
    steps: int = 0
    waited_seconds: float = 0.0
    bytes_sent: int = 0
    energy_joules: float | None = field(default=None, kw_only=True)


@dataclass(frozen=True)
class Point(Counters):
    """One `run.log(...)`: the metrics, and the counters at that moment."""

    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Note(Counters):
    """One decision of a strategy, such as a new period or phase, and when it was made."""

    values: Mapping[str, float | str] = field(default_factory=dict)


@dataclass(frozen=True)
class History:
    """Everything one run wrote. `start` is its latest start record, empty when there is none.

    `points` come as they were logged; `notes` by time, since a note may be written after logs
    that it came before. `last` is as far as any record goes, or the end.
    """

    start: Mapping[str, Any] = field(default_factory=dict)
    points: tuple[Point, ...] = ()
    last: Counters = Counters()
    finished: bool = False
    damage: tuple[str, ...] = ()
    notes: tuple[Note, ...] = ()
    gpu_peak_bytes: tuple[int, ...] = ()  # of each rank; empty: they had no GPUs

    @property
    def sync(self) -> str:
        return str(self.start.get("sync", "?"))

    @property
    def layout(self) -> str:
        """Where a replica of the model lived; empty: whole on every worker."""
        return str(self.start.get("layout") or "")

    @property
    def choices(self) -> dict[str, Any]:
        """What `run.choose` has decided, by name."""
        found = self.start.get("choices")
        return dict(found) if isinstance(found, dict) else {}

    @property
    def size(self) -> int:
        """How many workers; 0 when the start record is missing or makes no sense."""
        size = self.start.get("size", 0)
        return size if isinstance(size, int) else 0

    @property
    def metric_names(self) -> tuple[str, ...]:
        """In the order in which they were first logged."""
        return tuple(dict.fromkeys(name for point in self.points for name in point.metrics))

    def series(self, metric: str) -> tuple[Point, ...]:
        """The points that carry `metric`, in the order in which they were logged."""
        return tuple(point for point in self.points if metric in point.metrics)


def read_history(path: Path) -> History:
    """The run written to `path`, finished or not.

    A torn last line is skipped; damaged lines before it are listed in `History.damage`.
    Raises `UserError` when there is no such file.
    """
    follower = Follower(path)
    history = follower.poll()
    if not follower.exists:
        raise UserError(
            f"no metrics at {path}: the run wrote none. "
            "Does the script call run.log(...), and is this the run's own folder?"
        )
    return follower.poll_unterminated() or history


class Follower:
    """Reads a growing `metrics.jsonl`; each `poll` parses only the bytes that are new.

    The file need not exist yet. One that became shorter was replaced, and is read afresh.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.exists = False
        self._offset_bytes = 0
        self._tail = b""
        self._parser = _Parser()

    def poll(self) -> History:
        """Everything logged up to now. A line without its newline is left for the next poll."""
        try:
            with self.path.open("rb") as file:
                self.exists = True
                if file.seek(0, 2) < self._offset_bytes:
                    self._offset_bytes, self._tail, self._parser = 0, b"", _Parser()
                file.seek(self._offset_bytes)
                fresh = file.read()
        except FileNotFoundError:
            return self._parser.history()
        self._offset_bytes += len(fresh)
        *lines, self._tail = (self._tail + fresh).split(b"\n")
        for line in lines:
            self._parser.feed(line)
        return self._parser.history()

    def poll_unterminated(self) -> History | None:
        """The history with the unterminated last line, if that line is whole; None if it is torn.

        No proper prefix of a JSON object is itself one, so a line that parses was written whole.
        """
        if not self._tail.strip():
            return None
        try:
            self._parser.apply(_parse(self._tail))
        except ValueError:
            return None
        self._tail = b""
        return self._parser.history()


class _Parser:
    """Folds lines, in order, into a history."""

    def __init__(self) -> None:
        self._line = 0
        self._start: Mapping[str, Any] = {}
        self._points: list[Point] = []
        self._notes: list[Note] = []
        self._last = Counters()
        self._finished = False
        self._damage: list[str] = []
        self._gpu_peak_bytes: tuple[int, ...] = ()
        self._joules = 0.0  # the most so far,
        self._joules_before = 0.0  # and when the run was resumed: its meter began at 0 again

    def feed(self, line: bytes) -> None:
        self._line += 1
        if not line.strip():
            return
        try:
            self.apply(_parse(line))
        except ValueError as error:
            self._damage.append(f"line {self._line}: {error}")

    def apply(self, record: Mapping[str, Any]) -> None:
        event = record.get("event")
        if event == "start":
            self._start = record
            self._finished = False
            self._gpu_peak_bytes = ()  # of other ranks, perhaps
            self._joules_before = self._joules
        elif event in ("log", "end"):
            counters = self._counters(record)
            if event == "log":
                metrics = _values("metrics", record.get("metrics", {}))
                numbers = {k: v for k, v in metrics.items() if not isinstance(v, str)}
                self._points.append(Point(**vars(counters), metrics=numbers))
            self._last = counters
            self._finished = event == "end"
        elif event == "sync":
            counters = self._counters(record)
            self._notes.append(Note(**vars(counters), values=_values("sync", record.get("sync"))))
            if counters.time_seconds > self._last.time_seconds:
                self._last = counters
        elif event == "memory":
            self._gpu_peak_bytes = _counts("gpu_peak_bytes", record.get("gpu_peak_bytes"))
        elif event == "choice" and isinstance(record.get("choices"), dict):
            before = self._start.get("choices", {})
            self._start = {**self._start, "choices": {**before, **record["choices"]}}
        # Other events belong to later writers; an older reader passes over them.

    def _counters(self, record: Mapping[str, Any]) -> Counters:
        counters = _counters(record)
        if counters.energy_joules is None:
            return counters
        joules = self._joules_before + counters.energy_joules
        self._joules = max(self._joules, joules)
        return replace(counters, energy_joules=joules)

    def history(self) -> History:
        return History(
            start=self._start,
            points=tuple(self._points),
            last=self._last,
            finished=self._finished,
            damage=tuple(self._damage),
            notes=tuple(sorted(self._notes, key=lambda note: note.time_seconds)),
            gpu_peak_bytes=self._gpu_peak_bytes,
        )


def _parse(line: bytes) -> Mapping[str, Any]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        raise ValueError(f"not JSON: {_shown(line)}") from None
    if not isinstance(record, dict):
        raise ValueError(f"not a JSON object: {_shown(line)}")
    return record


def _shown(line: bytes) -> str:
    text = line.decode("utf-8", "replace").strip()
    return text if len(text) <= 60 else text[:59] + "…"


def _counters(record: Mapping[str, Any]) -> Counters:
    return Counters(
        time_seconds=_number(record, "time"),
        samples=int(_number(record, "samples")),
        steps=int(_number(record, "steps")),
        waited_seconds=_number(record, "waited_seconds"),
        bytes_sent=int(_number(record, "bytes_sent")),
        energy_joules=_number(record, "energy_joules") if "energy_joules" in record else None,
    )


def _number(record: Mapping[str, Any], key: str) -> float:
    value = record.get(key)
    if isinstance(value, int | float) and 0 <= value < MOST:
        return value
    raise ValueError(f"{key!r} is {value!r}, not a count or a duration")


def _counts(key: str, values: object) -> tuple[int, ...]:
    if not isinstance(values, list) or not all(
        isinstance(value, int) and 0 <= value < MOST for value in values
    ):
        raise ValueError(f"{key!r} is {values!r}, not a list of counts")
    return tuple(values)


def _values(key: str, values: object) -> dict[str, float | str]:
    """The numbers and the text. Non-finite numbers come as the strings "nan", "inf" and "-inf"."""
    if not isinstance(values, dict):
        raise ValueError(f"{key!r} is {values!r}, not an object")
    kept: dict[str, float | str] = {}
    for name, value in values.items():
        if isinstance(value, int | float) or value in ("nan", "inf", "-inf"):
            try:
                kept[name] = float(value)
            except OverflowError:
                kept[name] = math.inf if value > 0 else -math.inf
        elif isinstance(value, str):
            kept[name] = value
    return kept
