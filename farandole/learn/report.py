"""What a fit has cost: time and bytes of each pass over the data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any


@dataclass
class Counts:
    """Of one pass, or of several."""

    pieces: int = 0  # that were handed to workers
    backups: int = 0  # pieces that were given out a second time
    losses: int = 0  # of workers
    bytes_out: int = 0  # of states, to the workers
    bytes_in: int = 0  # of statistics, from the workers

    def since(self, before: Counts) -> Counts:
        """What has been added."""
        return Counts(*(getattr(self, f.name) - getattr(before, f.name) for f in fields(Counts)))


@dataclass(frozen=True)
class Pass:
    """One pass over the data."""

    job: str  # the kind of sum
    seconds: float
    counts: Counts


@dataclass
class Report:
    """Of one fit. `str` gives a table."""

    passes: list[Pass] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        return sum(each.seconds for each in self.passes)

    @property
    def bytes_moved(self) -> int:
        """Between this process and the workers, without what the pool itself adds."""
        return sum(each.counts.bytes_out + each.counts.bytes_in for each in self.passes)

    def __str__(self) -> str:
        lines = ["pass  sum               seconds  pieces  backups  lost   bytes out    bytes in"]
        for number, each in enumerate(self.passes, 1):
            c = each.counts
            lines.append(
                f"{number:4}  {each.job:16} {each.seconds:8.3f} {c.pieces:7} {c.backups:8} "
                f"{c.losses:5} {c.bytes_out:11,} {c.bytes_in:11,}"
            )
        lines.append(f"{len(self.passes)} passes, {self.seconds:.3f} s, {self.bytes_moved:,} bytes")
        return "\n".join(lines)


def nbytes(value: Any) -> int:
    """Of the arrays in a state or in statistics. Numbers and texts are not counted."""
    if isinstance(value, Mapping):
        return sum(map(nbytes, value.values()))
    if isinstance(value, (list, tuple)):
        return sum(map(nbytes, value))
    size = getattr(value, "nbytes", 0)
    return size if isinstance(size, int) else 0
