"""What the trials of `--per-gpu auto` have shown, as a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from farandole.errors import FarandoleError
from farandole.worker.trial.record import ThroughputRecord

_NOTHING = "-"
_HEADINGS = ("workers a GPU", "samples/s", "samples a step", "GPU use", "GPU memory", "")


@dataclass(frozen=True)
class Trial:
    """One number of workers a GPU, and how it went. None: not known."""

    per_gpu: int
    record: ThroughputRecord | None = None
    busy_percent: float | None = None  # mean over GPUs and time
    used_mib: float | None = None  # of the fullest GPU, at its peak
    total_mib: float | None = None
    problem: str = ""
    error: FarandoleError | None = None  # where larger numbers would do no better

    @property
    def samples_per_second(self) -> float | None:
        return None if self.record is None else self.record.samples_per_second


def table(trials: Sequence[Trial]) -> str:
    """In columns, one trial a line."""
    rows = [_HEADINGS, *map(_row, trials)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(cell.rjust(width) for cell, width in zip(row[:-1], widths, strict=False))
        + (f"  {row[-1]}" if row[-1] else "")
        for row in rows
    ]
    return "".join(f"  {line}\n" for line in lines)


def _row(trial: Trial) -> tuple[str, ...]:
    record, rate = trial.record, trial.samples_per_second
    return (
        str(trial.per_gpu),
        _NOTHING if rate is None else f"{rate:,.1f}",
        _NOTHING if record is None else f"{record.samples / record.steps:,.0f}",
        _NOTHING if trial.busy_percent is None else f"{trial.busy_percent:.0f} %",
        _memory(trial),
        trial.problem,
    )


def _memory(trial: Trial) -> str:
    if trial.used_mib is None:
        return _NOTHING
    of = "" if trial.total_mib is None else f" of {trial.total_mib / 1024:.1f}"
    return f"{trial.used_mib / 1024:.1f}{of} GiB"
