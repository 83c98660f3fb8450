"""Writes `runs/<name>/metrics.jsonl` and the same numbers for TensorBoard.

One JSON object per line, each line written whole, so that a reader can follow a run under way:
a "start" record, a "log" record for every `run.log`, a "sync" record for every decision of a
strategy that adapts, a "memory" record where ranks have used more of their GPUs, an "end" record
when the run closes.
"""

from __future__ import annotations

import errno
import json
import math
import os
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from farandole.report import memory

FILE_NAME = "metrics.jsonl"


class MetricsLog:
    """The metrics of one run. Only rank 0 has one."""

    def __init__(self, folder: Path, start: Mapping[str, Any], *, resumed: bool = False) -> None:
        """Opens the log: a resumed run adds to its own, another run sets an old one aside.

        Raises `OSError` when the folder cannot be made or written.
        """
        folder.mkdir(parents=True, exist_ok=True)
        if resumed:
            _end_torn_line(folder / FILE_NAME)
        else:
            _set_aside(folder)
        self._file = (folder / FILE_NAME).open("ab", buffering=0)
        self._boards = _TensorBoard(folder)
        self._write({"event": "start", "unix_time": time.time(), **start})

    def log(self, counters: Mapping[str, float], metrics: Mapping[str, float | str]) -> None:
        """Adds one record; `counters` are the run's own numbers, `metrics` the user's."""
        self._write({"event": "log", **counters, "metrics": dict(metrics)})
        self._boards.log(int(counters["samples"]), metrics)

    def note(self, counters: Mapping[str, float], values: Mapping[str, float | str]) -> None:
        """Adds one decision of a strategy, with the counters of the moment it was made.

        That moment may be earlier than the last record: readers sort by time. TensorBoard gets
        the numbers, as `sync/<name>`.
        """
        self._write({"event": "sync", **counters, "sync": dict(values)})
        numbers = {f"sync/{k}": v for k, v in values.items() if not isinstance(v, str)}
        self._boards.log(int(counters["samples"]), numbers)

    def gpu_memory(self, peak_bytes: Sequence[int]) -> None:
        """Adds what the tensors of each rank took of its GPU at their peak so far."""
        self._write({"event": "memory", "gpu_peak_bytes": list(peak_bytes)})

    def choose(self, values: Mapping[str, bool | float | str | None]) -> None:
        """Adds what a run has chosen after its first log."""
        self._write({"event": "choice", "choices": dict(values)})

    def close(self, counters: Mapping[str, float]) -> None:
        """Adds the end record and closes the files."""
        if self._file.closed:
            return
        try:
            self._write({"event": "end", **counters})
        finally:
            self._file.close()
            self._boards.close()

    def _write(self, record: Mapping[str, Any]) -> None:
        line = (json.dumps(_finite(record)) + "\n").encode()
        end = self._file.seek(0, os.SEEK_END)
        if self._file.write(line) != len(line):  # the disk is full: leave no torn line behind
            self._file.truncate(end)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _set_aside(folder: Path) -> None:
    """Moves an earlier run's metrics, memory and curves for TensorBoard to a folder beside them."""
    old = folder / FILE_NAME
    if not old.exists():
        return
    aside = folder / f"earlier-{old.stat().st_mtime_ns}"
    aside.mkdir(exist_ok=True)
    for file in (*folder.glob("events.out.tfevents.*"), *folder.glob(memory.FOLDER), old):
        file.rename(aside / file.name)


def _end_torn_line(path: Path) -> None:
    """A run that was killed may have left half a line; what follows must not be glued to it."""
    if not path.exists() or path.stat().st_size == 0:
        return
    with path.open("rb+") as file:
        file.seek(-1, os.SEEK_END)
        if file.read() != b"\n":
            file.write(b"\n")


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity: they are written as "nan", "inf" and "-inf"."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    return value


class _TensorBoard:
    """Scalars by samples seen. Uses TensorBoard's own writer; without it, says so once."""

    def __init__(self, folder: Path) -> None:
        self._writer: Any = None
        try:
            # TensorBoard's writer needs TensorFlow for remote folders only, and would import it
            # where it is installed, for ten seconds. This module is how it is told not to.
            if "tensorflow" not in sys.modules:
                sys.modules.setdefault("tensorboard.compat.notf", ModuleType("notf"))
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            warnings.warn(
                "TensorBoard is not installed; metrics go to metrics.jsonl only. "
                "`pip install tensorboard` adds it.",
                stacklevel=2,
            )
            return
        try:
            self._writer = SummaryWriter(str(folder))
        except UnicodeError:
            warnings.warn(
                f"TensorBoard cannot write to {str(folder)!r}, whose name has bytes that are no "
                "characters here; metrics go to metrics.jsonl only. Give --runs and --name another "
                "name, or set LC_ALL=C.UTF-8.",
                stacklevel=2,
            )

    def log(self, samples: int, metrics: Mapping[str, float | str]) -> None:
        if self._writer is None:
            return
        for name, value in metrics.items():
            if isinstance(value, str):
                self._writer.add_text(name, value, samples)
            else:
                self._writer.add_scalar(name, value, samples)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
