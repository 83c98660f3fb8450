"""Who waits for whom: a part of a run's trace, and sums over all of it.

`farandole race --trace` leaves a `trace.json` in the folder of each lane. A trace has millions of
spans in a long run, so the page shows a part of it, from the middle of the run.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from farandole.report import units
from farandole.report.lane import Lane

TRACE_NAME = "trace.json"
LARGEST_BYTES = 100 * 2**20
MOST_SPANS = 100  # of a rank
MOST_LINES = 8
_GRADIENTS = "waiting for gradients"
_KINDS = {
    "compute": "compute",
    "stage": "compute",
    "wait": "wait",
    "comm": "communication",
    "data": "data",
}
_HIDDEN = frozenset({"gradients"})  # buckets overlap everything


@dataclass(frozen=True)
class _Span:
    begin: float  # in seconds
    end: float
    kind: str
    name: str


def read_timeline(lane: Lane) -> dict[str, Any] | None:
    """None where the lane has no trace. What cannot be read is said in its place."""
    path = None if lane.folder is None else lane.folder / TRACE_NAME
    if path is None or not path.is_file():
        return None
    try:
        facts = path.stat()
    except OSError:
        return None
    return _read(path, facts.st_size, facts.st_mtime_ns)


@lru_cache(maxsize=256)  # a live page asks again and again
def _read(path: Path, size: int, mtime_ns: int) -> dict[str, Any]:
    try:
        if size > LARGEST_BYTES:
            said = f"The trace has {units.bytes_count(size)}, too much for a page: {path}"
            return _timeline({}, [said])
        return timeline_of(json.loads(path.read_bytes())["traceEvents"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        return _timeline({}, [f"The trace {path} cannot be read: {error!r}"])


def timeline_of(events: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Chrome's events as rows, and sentences on who waited."""
    ranks = _spans(events)
    return _timeline(_part(ranks), [*_waits_for_gradients(ranks), *_waits_for_stages(ranks)])


def _timeline(rows: Mapping[int, Sequence[_Span]], waits: Sequence[str]) -> dict[str, Any]:
    spans = [span for of_rank in rows.values() for span in of_rank]
    return {
        "begin": min((span.begin for span in spans), default=0.0),
        "end": max((span.end for span in spans), default=1.0),
        "rows": [
            {"rank": rank, "spans": [[s.begin, s.end, s.kind, s.name] for s in rows[rank]]}
            for rank in sorted(rows)
        ],
        "waits": list(waits),
    }


def _spans(events: Sequence[Mapping[str, Any]]) -> dict[int, list[_Span]]:
    """By rank. Collectives in the background are left out: nobody waits for them there."""
    rows = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    ranks: dict[int, list[_Span]] = defaultdict(list)
    for event in events:
        category = event.get("cat")
        if event["ph"] != "X" or category in _HIDDEN:
            continue
        if category == "comm" and rows.get((event["pid"], event["tid"])) != "main":
            continue
        begin = event["ts"] / 1e6
        kind = _KINDS.get(str(category), "other")
        ranks[event["pid"]].append(_Span(begin, begin + event["dur"] / 1e6, kind, event["name"]))
    for spans in ranks.values():
        # Waiting is inside of the backward pass, and is drawn over it.
        spans.sort(key=lambda span: (span.kind == "wait", span.begin, -span.end))
    return ranks


def _part(ranks: Mapping[int, Sequence[_Span]]) -> dict[int, list[_Span]]:
    """The middle of the run, as long as the first rank has so many spans in it."""
    if not ranks:
        return {}
    first = sorted(ranks[min(ranks)], key=lambda span: span.begin)
    middle = len(first) // 2
    shown = first[max(0, middle - MOST_SPANS // 2) : middle + MOST_SPANS // 2 + 1]
    begin, end = shown[0].begin, max(span.end for span in shown)
    return {
        rank: [span for span in spans if span.end >= begin and span.begin <= end][: 4 * MOST_SPANS]
        for rank, spans in ranks.items()
    }


def _waits_for_gradients(ranks: Mapping[int, Sequence[_Span]]) -> list[str]:
    """How long each rank waited, and how much of it while which other rank still computed.

    The waits of a step are the ones with the same number on every rank.
    """
    waits = {rank: [s for s in spans if s.name == _GRADIENTS] for rank, spans in ranks.items()}
    waits = {rank: found for rank, found in waits.items() if found}
    late: defaultdict[tuple[int, int], float] = defaultdict(float)
    for step in zip(*waits.values(), strict=False):
        by_rank = dict(zip(waits, step, strict=True))
        last = max(by_rank, key=lambda rank: by_rank[rank].begin)
        for rank, span in by_rank.items():
            if rank != last and span.begin < by_rank[last].begin <= span.end:
                late[rank, last] += by_rank[last].begin - span.begin
    lines = []
    for rank in sorted(waits, key=lambda rank: -_total(waits[rank]))[:MOST_LINES]:
        parts = [
            f"{units.seconds(seconds)} of it until rank {other} had computed its own"
            for (waiting, other), seconds in sorted(late.items(), key=lambda item: -item[1])
            if waiting == rank
        ]
        lines.append(
            f"Rank {rank} waited {units.seconds(_total(waits[rank]))} for gradients"
            + "".join(f", {part}" for part in parts[:3])
            + "."
        )
    return lines


def _waits_for_stages(ranks: Mapping[int, Sequence[_Span]]) -> list[str]:
    totals: defaultdict[tuple[int, str], float] = defaultdict(float)
    for rank, spans in ranks.items():
        for span in spans:
            if span.kind == "wait" and span.name.startswith("waiting for stage"):
                totals[rank, span.name.removeprefix("waiting for ")] += span.end - span.begin
    longest = sorted(totals.items(), key=lambda item: -item[1])
    return [
        f"Rank {rank} waited {units.seconds(seconds)} for {stage}."
        for (rank, stage), seconds in longest[:MOST_LINES]
    ]


def _total(spans: Sequence[_Span]) -> float:
    return sum(span.end - span.begin for span in spans)
