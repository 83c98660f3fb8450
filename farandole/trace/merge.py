"""From the ranks' own files to one trace that Perfetto and Chrome open.

Every rank writes its spans to a part of its own beside the trace (`farandole.trace.recorder` says
what is in it), so that nothing is lost when a rank is killed. When all have ended, the parts become
one file, on rank 0's clock. As a module this file does that by hand, for parts that nobody merged:
`python -m farandole.trace.merge out.json`.
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from farandole.errors import FarandoleError, UserError
from farandole.files import write_whole
from farandole.trace.chrome import TraceTimeline, read_part, timeline

_POLL_SECONDS = 0.02
_TAIL_BYTES = 4096


def parts_folder(target: Path) -> Path:
    return target.with_name(f"{target.name}.parts")


def part_file(parts: Path, rank: int) -> Path:
    return parts / f"rank-{rank}.jsonl"


def prepare(target: Path) -> Path:
    """An empty folder for the parts of `target`. Raises `UserError` when it cannot be written."""
    if target.suffix != ".json":
        raise UserError(f"a trace is JSON: write --trace {target.with_suffix('.json')}.")
    if target.is_dir():
        raise UserError(f"the trace {target} is a folder; name a file in it.")
    parts = parts_folder(target)
    try:
        parts.mkdir(parents=True, exist_ok=True)
        _remove_files(parts)
        with tempfile.TemporaryFile(dir=target.parent):
            pass
    except OSError as error:
        raise UserError(
            f"the trace {target} cannot be written: {error}. Name a file in a folder of yours."
        ) from error
    return parts


def wait_for_ends(parts: Path, ranks: Iterable[int], patience_seconds: float) -> None:
    """Returns when each of these ranks has ended its part, or when patience has."""
    deadline = time.monotonic() + patience_seconds
    waiting = list(ranks)
    while waiting and time.monotonic() < deadline:
        if _has_ended(part_file(parts, waiting[0])):
            waiting.pop(0)
        else:
            time.sleep(_POLL_SECONDS)


def _has_ended(part: Path) -> bool:
    try:
        with part.open("rb") as file:
            file.seek(max(0, part.stat().st_size - _TAIL_BYTES))
            return file.read().rstrip(b"\n").rpartition(b"\n")[2].startswith(b'{"end":')
    except OSError:  # not there yet
        return False


@dataclass(frozen=True)
class Merged:
    """A trace that was written, and what is not in it."""

    target: Path
    parts: Path
    ranks: tuple[int, ...]
    spans: int
    missing: tuple[int, ...]  # ranks of which nothing was found
    unended: tuple[int, ...]  # ranks that did not end their part: killed, or still running
    lost: int  # spans that a slow disk had no room for

    def __str__(self) -> str:
        text = f"the trace of {_ranks(self.ranks)} is {self.target} ({self.spans:,} spans"
        if self.missing:
            text += f"; nothing of {_ranks(self.missing)}"
        if self.unended:
            text += f"; {_ranks(self.unended)} did not end in order"
        if self.lost:
            text += f"; {self.lost:,} more were lost to a slow disk"
        return f"{text}). Open it at https://ui.perfetto.dev"


def merge(target: Path) -> Merged | None:
    """Writes `target`, whole or not at all; None when no rank has recorded anything.

    The parts stay; `remove_parts` takes them away. Raises `FarandoleError` when the trace cannot
    be written.
    """
    folder = parts_folder(target)
    read = (read_part(path) for path in folder.glob("rank-*.jsonl"))
    parts = sorted((part for part in read if part is not None), key=lambda part: part.rank)
    if not parts:
        return None
    line = timeline(parts)
    _write(target, folder, line)
    present = {part.rank for part in parts}
    return Merged(
        target,
        folder,
        tuple(sorted(present)),
        spans=sum(event["ph"] == "X" for event in line.events),
        missing=tuple(sorted(set(range(parts[0].size)) - present)),
        unended=tuple(part.rank for part in parts if not part.ended),
        lost=sum(part.lost for part in parts),
    )


def remove_parts(target: Path) -> None:
    """Takes away what `prepare` and the ranks have made."""
    parts = parts_folder(target)
    with contextlib.suppress(OSError):
        _remove_files(parts)
        parts.rmdir()


def _remove_files(parts: Path) -> None:
    for part in parts.glob("rank-*.jsonl"):
        part.unlink()


def _write(target: Path, parts: Path, line: TraceTimeline) -> None:
    lines = ",\n".join(json.dumps(event, separators=(",", ":")) for event in line.events)
    head = f'{{"displayTimeUnit":"ms","otherData":{json.dumps(line.facts)},"traceEvents":[\n'
    try:
        write_whole(target, f"{head}{lines}\n]}}\n".encode())
    except FarandoleError as error:
        raise FarandoleError(
            f"could not write the trace: {error.__cause__}. What was recorded is in {parts}; make "
            f"room, then: python -m farandole.trace.merge {target}"
        ) from error


def _ranks(ranks: Sequence[int]) -> str:
    few = ", ".join(map(str, ranks[:8])) + (", …" if len(ranks) > 8 else "")
    return f"{len(ranks)} ranks ({few})" if len(ranks) > 1 else f"rank {few}"


def _by_hand(arguments: Sequence[str]) -> str:
    if len(arguments) != 1:
        return "python -m farandole.trace.merge TRACE.json"
    try:
        merged = merge(Path(arguments[0]))
    except FarandoleError as error:
        return str(error)
    if merged is None:
        return f"there is nothing in {parts_folder(Path(arguments[0]))}"
    print(merged)
    return ""


if __name__ == "__main__":
    sys.exit(_by_hand(sys.argv[1:]) or 0)
