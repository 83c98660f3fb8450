"""How much memory each rank has used at most: `memory/rank-N.jsonl` in the folder of a run.

Every rank writes its own file, because ranks must not have to meet for a log. A rank on a host that
does not see the folder of the run has none.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from farandole.system.memory import peak_process_bytes

FOLDER = "memory"
_TAIL_BYTES = 4096
_FIRST_SECONDS = 2.0
_LINES = 200  # after so many the interval doubles: the file of a long run stays small


@dataclass(frozen=True)
class PeakMemory:
    """`device_bytes`: of tensors on a GPU; None without one."""

    rank: int
    process_bytes: int
    device_bytes: int | None = None


class MemoryLog:
    """One rank's. What cannot be written is left out: a full disk must not end a run for it."""

    def __init__(self, device_bytes: Callable[[], int | None]) -> None:
        self._device_bytes = device_bytes
        self._interval = _FIRST_SECONDS
        self._next = 0.0
        self._lines = 0

    def note(self, folder: Path, rank: int, *, now: bool = False) -> None:
        """If the last line is old enough, or `now`; and if rank 0 has made the run's folder."""
        if (time.monotonic() < self._next and not now) or not folder.is_dir():
            return
        peak = PeakMemory(rank, peak_process_bytes(), self._device_bytes())
        with contextlib.suppress(OSError):
            (folder / FOLDER).mkdir(exist_ok=True)
            with (folder / FOLDER / f"rank-{rank}.jsonl").open("ab") as file:
                file.write(json.dumps(asdict(peak)).encode() + b"\n")
        self._lines += 1
        if self._lines % _LINES == 0:
            self._interval *= 2
        self._next = time.monotonic() + self._interval


def read_peaks(folder: Path | None) -> list[PeakMemory]:
    """By rank; empty where nothing was written. The last whole line of each file counts."""
    if folder is None:
        return []
    found = (_read_last(path) for path in (folder / FOLDER).glob("rank-*.jsonl"))
    return sorted((peak for peak in found if peak is not None), key=lambda peak: peak.rank)


def _read_last(path: Path) -> PeakMemory | None:
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            lines = file.read().split(b"\n")[:-1]  # the last may be half a line
        said = json.loads(lines[-1])
        device = said["device_bytes"]
        return PeakMemory(
            int(said["rank"]),
            int(said["process_bytes"]),
            None if device is None else int(device),
        )
    except (OSError, ValueError, LookupError, TypeError):
        return None
