"""Verdicts as text: a line for each drill, and one for all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from faults.table import Drill

Record = Mapping[str, Any]


def line(drill: Drill, verdict: Record) -> str:
    """In one line: as promised or not, the figures, who was named, what was broken."""
    if verdict["skipped"]:
        return f"skipped  {drill.name}: {verdict['skipped']}"
    sign = "BROKEN  " if verdict["broken"] else "ok      "
    seconds = "-" if verdict["seconds"] is None else f"{verdict['seconds']:.1f} s"
    named = f"; named: {', '.join(verdict['named'])}" if verdict["named"] else ""
    text = f"{sign} {drill.name}: {seconds}, exit code {verdict['code']}{named}"
    return text + "".join(f"\n           {one}" for one in verdict["broken"])


def without_output(verdict: Record) -> Record:
    """What is kept: the figures, not what a job has written."""
    return {key: value for key, value in verdict.items() if key != "output"}


def summary(verdicts: Mapping[str, Record | None]) -> str:
    """The last line of a table."""
    run = [verdict for verdict in verdicts.values() if verdict and not verdict["skipped"]]
    kept = sum(not verdict["broken"] for verdict in run)
    skipped = len(verdicts) - len(run)
    return f"{kept} of {len(run)} ended as promised" + (f"; {skipped} not run" if skipped else "")
