"""One rank's spans, kept in a file as they come.

Recording must not slow down what it records, so a span that ends is one tuple appended to a queue;
a thread formats and writes a few times a second. What is written stays when this process is killed,
and so does the knowledge of what it was in the middle of: spans that have begun and not ended are
written each time, and the last such line counts.

The file is JSON, one value a line:

    {"rank": 0, "size": 2, "host": "a", "pid": 4711}          first
    {"threads": ["main", "comm", "gradients"]}                the rows so far; row 1 is the first
    [["forward", "compute", begin_ns, end_ns, row, {…}], …]   spans that have ended
    {"open": [["backward", "compute", begin_ns, row, {…}]], "at": now_ns}
    {"clock": {"at": …, "offset_ns": …, "error_ns": …}}       see `farandole.trace.clock`
    {"end": now_ns, "lost": 0}                                last, if the rank closed it

Times are this host's `time.perf_counter_ns`, which on Linux all processes of a host share.
"""

from __future__ import annotations

import heapq
import json
import os
import threading
from collections import Counter, deque
from collections.abc import Mapping
from pathlib import Path
from time import perf_counter_ns
from types import TracebackType
from typing import Any

from farandole.trace.spans import OVERLAPPING

_FLUSH_SECONDS = 0.2
_PATIENCE_SECONDS = 5.0  # at the end, with a disk that hangs
_MOST_WAITING = 100_000  # spans that may wait for a disk that does not come along
_SPANS_PER_LINE = 256  # formatting a line is one call that lets no other thread run

Details = dict[str, str | int | float]


class Recorder:
    """A `Trace` that writes to a file of its own. Any thread may record spans."""

    def __init__(self, path: Path, header: Mapping[str, Any]) -> None:
        """Raises `OSError` when the file cannot be written; later troubles end in `problem`."""
        self.path = path
        self.problem: OSError | None = None  # from then on nothing is kept
        # Unbuffered: a process that is forked off must not write our buffer a second time.
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND
        self._file = os.open(path, flags, 0o644)
        self._lines: list[str] = [_line(header)]
        self._ended: deque[tuple[str, str, int, int, int, Details]] = deque()
        self._open: dict[_Span, None] = {}
        self._lost = 0
        self._lock = threading.Lock()  # for rows
        self._writing = threading.Lock()
        self._here = threading.local()
        self._rows: list[str] = []
        self._named: Counter[str] = Counter()
        self._rows_written = 0
        self._free: dict[str, list[int]] = {category: [] for category in OVERLAPPING}
        self._here.row = self._add_row("main")
        self._stopped = threading.Event()
        self.flush()
        if self.problem is not None:
            raise self.problem
        self._thread = threading.Thread(target=self._serve, name="trace", daemon=True)
        self._thread.start()

    def span(self, name: str, category: str, **details: str | int | float) -> _Span:
        kind = _OverlappingSpan if category in OVERLAPPING else _Span
        return kind(self, name, category, details)

    def note(self, line: Mapping[str, Any]) -> None:
        """A line beside the spans."""
        with self._writing:
            self._lines.append(_line(line))

    def flush(self) -> None:
        """Writes what has come so far."""
        with self._writing:
            lines, self._lines = self._lines, []
            spans = [self._ended.popleft() for _ in range(len(self._ended))]
            # After the spans that have ended, in this order: a span that ends in between is missing
            # in both lists now, and is in the first one next time. In the other order it could be
            # in both, and would be drawn twice after a crash.
            begun = [span.begun() for span in list(self._open)]
            rows = len(self._rows)  # counted last: those of all these spans are among them
            if rows > self._rows_written:
                lines.append(_line({"threads": self._rows[:rows]}))
                self._rows_written = rows
            for start in range(0, len(spans), _SPANS_PER_LINE):
                lines.append(_line(spans[start : start + _SPANS_PER_LINE]))
            if spans or begun:
                lines.append(_line({"open": begun, "at": perf_counter_ns()}))
            self._write("".join(lines).encode())

    def close(self) -> None:
        """Writes the rest and ends the file. Spans that end from now on are lost."""
        if self._stopped.is_set():
            return
        self._stopped.set()
        self._thread.join(_PATIENCE_SECONDS)
        if self._thread.is_alive():
            self.problem = TimeoutError(f"{self.path} takes no more")
            return
        self.flush()
        self._write(_line({"end": perf_counter_ns(), "lost": self._lost}).encode())
        if self.problem is None:
            os.close(self._file)

    def _write(self, data: bytes) -> None:
        try:
            # In one piece as a rule; a disk that fills up takes a part.
            while data and self.problem is None:
                data = data[os.write(self._file, data) :]
        except OSError as error:
            self.problem = error
            os.close(self._file)

    def _serve(self) -> None:
        while not self._stopped.wait(_FLUSH_SECONDS):
            self.flush()

    # Rows of the picture: one for each thread, and as many as needed for spans that overlap

    def _add_row(self, name: str) -> int:
        self._named[name] += 1
        number = self._named[name]
        self._rows.append(name if number == 1 else f"{name} {number}")
        return len(self._rows)

    def _new_thread(self) -> int:
        thread = threading.current_thread()
        # A thread that Python did not start is one that runs a GPU's backward pass.
        foreign = isinstance(thread, threading._DummyThread)
        with self._lock:
            row = self._add_row("autograd" if foreign else thread.name)
        self._here.row = row
        return row

    def _take_row(self, category: str) -> int:
        with self._lock:
            free = self._free[category]
            return heapq.heappop(free) if free else self._add_row(category)

    def _free_row(self, category: str, row: int) -> None:
        with self._lock:
            heapq.heappush(self._free[category], row)


class _Span:
    __slots__ = ("_begin", "_category", "_details", "_name", "_recorder", "_row")

    def __init__(self, recorder: Recorder, name: str, category: str, details: Details) -> None:
        self._recorder = recorder
        self._name = name
        self._category = category
        self._details = details

    def __enter__(self) -> None:
        recorder = self._recorder
        try:
            self._row: int = recorder._here.row
        except AttributeError:
            self._row = recorder._new_thread()
        self._begin = perf_counter_ns()
        recorder._open[self] = None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        end = perf_counter_ns()
        recorder = self._recorder
        # Without a lock: each of these is one operation on a dict or a deque, which Python makes
        # atomic. Out of `_open` before into `_ended`: see `flush`.
        del recorder._open[self]
        if len(recorder._ended) < _MOST_WAITING:
            recorder._ended.append(
                (self._name, self._category, self._begin, end, self._row, self._details)
            )
        else:
            recorder._lost += 1

    def begun(self) -> tuple[str, str, int, int, Details]:
        """What is known of a span that has not ended."""
        return self._name, self._category, self._begin, self._row, self._details


class _OverlappingSpan(_Span):
    """A span on a row that is free, whichever thread begins and ends it."""

    __slots__ = ()

    def __enter__(self) -> None:
        self._row = self._recorder._take_row(self._category)
        self._begin = perf_counter_ns()
        self._recorder._open[self] = None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        super().__exit__(kind, error, trace)
        self._recorder._free_row(self._category, self._row)


def _line(value: Any) -> str:
    return json.dumps(value, separators=(",", ":")) + "\n"
