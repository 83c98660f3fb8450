"""Tells, from time to time, what some ranks wait for and which ranks have not asked for it."""

from __future__ import annotations

from farandole.horovod.engine.table import Table

_SHOWN = 8


class StallWatch:
    """`warning_seconds`, `shutdown_seconds`: 0 is never."""

    def __init__(self, table: Table, warning_seconds: float, shutdown_seconds: float) -> None:
        self._table = table
        self._warning_seconds = warning_seconds
        self._shutdown_seconds = shutdown_seconds
        self._next = warning_seconds

    def report(self, now: float) -> str:
        """A warning when one is due: at most one in each time of that length. Else empty."""
        if not self._warning_seconds or now < self._next:
            return ""
        found = self._table.overdue(now - self._warning_seconds)
        if not found:
            return ""
        self._next = now + self._warning_seconds
        lines = [
            f"{name}: asked for by {_ranks(asked)}, missing from {_ranks(missing)}"
            for name, asked, missing in found[:_SHOWN]
        ]
        if len(found) > _SHOWN:
            lines.append(f"… and {len(found) - _SHOWN} more")
        said = "\n  ".join(lines)
        return (
            f"for more than {self._warning_seconds:g} s some ranks have been waiting "
            f"for others, which may do something else, or have taken another branch:\n  {said}"
        )

    def fatal(self, now: float) -> str:
        """Why the job should end, if somebody has waited too long. Else empty."""
        if not self._shutdown_seconds:
            return ""
        found = self._table.overdue(now - self._shutdown_seconds)
        if not found:
            return ""
        name, asked, missing = found[0]
        return (
            f"{_ranks(asked)} waited more than {self._shutdown_seconds:g} s for {_ranks(missing)} "
            f"to ask for {name!r} (HOROVOD_STALL_SHUTDOWN_TIME_SECONDS)"
        )


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
