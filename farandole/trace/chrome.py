"""What the ranks recorded, as events of Chrome's trace format on one clock.

The format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU. A rank
is a process there, a row a thread; spans on a row lie inside one another or apart.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from farandole.trace.spans import OVERLAPPING

Event = dict[str, Any]


@dataclass
class TraceFile:
    """What one rank has written."""

    rank: int
    size: int
    host: str
    pid: int
    threads: list[str] = field(default_factory=list)
    spans: list[list[Any]] = field(default_factory=list)
    open: list[list[Any]] = field(default_factory=list)
    open_at: int = 0
    clock: list[dict[str, int]] = field(default_factory=list)
    ended: bool = False
    lost: int = 0
    damaged_lines: int = 0

    def all_spans(self) -> Iterator[tuple[str, str, int, int, int, dict[str, Any]]]:
        """Those that never ended last as long as this rank was seen alive."""
        for name, category, begin, end, row, details in self.spans:
            yield name, category, begin, end, row, details
        for name, category, begin, row, details in self.open:
            yield name, category, begin, self.open_at, row, {**details, "unfinished": True}


def read_part(path: Path) -> TraceFile | None:
    """None for a file without so much as a whole first line."""
    part: TraceFile | None = None
    damaged = 0
    for line in path.read_bytes().splitlines():
        try:
            value = json.loads(line)
            if part is None:
                part = TraceFile(value["rank"], value["size"], value["host"], value["pid"])
                continue
        except (ValueError, TypeError, KeyError):
            damaged += 1  # the process was killed, or the disk was full, in the middle of it
            continue
        if isinstance(value, list):
            part.spans += value
        elif "threads" in value:
            part.threads = value["threads"]
        elif "open" in value:
            part.open, part.open_at = value["open"], value["at"]
        elif "clock" in value:
            part.clock.append(value["clock"])
        elif "end" in value:
            part.ended, part.lost = True, value["lost"]
    if part is not None:
        part.damaged_lines = damaged
    return part


class HostClock:
    """Converts one host's clock to rank 0's, by a straight line between the measured offsets."""

    def __init__(self, measured: Sequence[dict[str, int]]) -> None:
        self._measured = sorted(measured, key=lambda offset: offset["at"])
        self._at = [offset["at"] for offset in self._measured]

    def on_rank_0(self, time_ns: int) -> int:
        if not self._measured:
            return time_ns
        # Offsets are measured at the start and at the end. Two oscillators drift apart steadily, by
        # some microseconds a second, so a straight line between is close; outside of the two the
        # nearest offset holds. The result grows with `time_ns`, and spans keep their order.
        after = bisect_right(self._at, time_ns)
        if after in (0, len(self._at)):
            return time_ns + self._measured[max(0, after - 1)]["offset_ns"]
        left, right = self._measured[after - 1 : after + 1]
        share = (time_ns - left["at"]) / (right["at"] - left["at"])
        return time_ns + left["offset_ns"] + round(share * (right["offset_ns"] - left["offset_ns"]))

    def facts(self) -> dict[str, Any]:
        if not self._measured:
            return {"measured": 0}
        offsets = [offset["offset_ns"] / 1000 for offset in self._measured]
        return {
            "measured": len(offsets),
            "offset_us": offsets[0],
            "moved_us": round(offsets[-1] - offsets[0], 3),
            "error_us": max(offset["error_ns"] for offset in self._measured) / 1000,
        }


@dataclass(frozen=True)
class TraceTimeline:
    """All ranks' events, and what is to be said about them."""

    facts: dict[str, Any]
    events: list[Event]


def timeline(parts: Sequence[TraceFile]) -> TraceTimeline:
    """The earliest span of any rank begins at 0."""
    hosts: dict[str, list[TraceFile]] = {}
    for part in parts:
        hosts.setdefault(part.host, []).append(part)
    clocks = {
        host: HostClock([offset for part in there for offset in part.clock])
        for host, there in hosts.items()
    }
    begins = (clocks[part.host].on_rank_0(span[2]) for part in parts for span in part.all_spans())
    first = min(begins, default=0)
    events: list[Event] = []
    for part in parts:
        events += _names(part)
        events += _spans(part, clocks[part.host], first)
    facts = {
        "ranks": parts[0].size,
        "clocks": [
            {"host": host, "ranks": [part.rank for part in there], **clocks[host].facts()}
            for host, there in hosts.items()
        ],
        "damaged_lines": sum(part.damaged_lines for part in parts),
    }
    return TraceTimeline(facts, events)


def _names(part: TraceFile) -> Iterator[Event]:
    """What Perfetto calls the rows, and in which order it shows them."""

    def said(what: str, row: int, **args: str | int) -> Event:
        return {"name": what, "ph": "M", "pid": part.rank, "tid": row, "args": args}

    title = f"rank {part.rank} on host {part.host}"
    yield said("process_name", 0, name=title)
    yield said("process_labels", 0, labels=f"process {part.pid}")
    yield said("process_sort_index", 0, sort_index=part.rank)
    for row, name in enumerate(part.threads, start=1):
        yield said("thread_name", row, name=name)
        below = len(part.threads) if name.split()[0] in OVERLAPPING else 0  # the real threads
        yield said("thread_sort_index", row, sort_index=row + below)


def _spans(part: TraceFile, clock: HostClock, first: int) -> Iterator[Event]:
    for name, category, begin, end, row, details in part.all_spans():
        start = clock.on_rank_0(begin) - first
        stop = clock.on_rank_0(end) - first
        yield {
            "name": name,
            "cat": category,
            "ph": "X",
            "ts": start / 1000,  # in microseconds, as the format has it
            "dur": (stop - start) / 1000,
            "pid": part.rank,
            "tid": row,
            "args": {key: value for key, value in details.items() if value != ""},
        }
