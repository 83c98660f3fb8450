"""The table of docs/faults.md, made from the kept result.

Drills in which the same thing strikes the same role, with the same promise, share a row.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from faults.table import Drill, drills

REPOSITORY = Path(__file__).parents[2]
PAGE = REPOSITORY / "docs" / "faults.md"
RESULT = REPOSITORY / "benchmarks" / "results" / "drills.json"
BEGIN, END = "<!-- begin: made by benchmarks/drills.py -->", "<!-- end -->"

Record = Mapping[str, Any]


def write_page() -> None:
    """Puts the table of the kept result into the page."""
    text = PAGE.read_text()
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    half = PAGE.with_suffix(".half")
    half.write_text(f"{before}{BEGIN}\n{table(json.loads(RESULT.read_text()))}{END}{after}")
    half.replace(PAGE)


def table(result: Record) -> str:
    """In Markdown, with the summary above it."""
    verdicts = {record["drill"]: record for record in result["drills"]}
    groups: dict[tuple[str, ...], list[Drill]] = {}
    for drill in drills():
        if drill.name in verdicts:
            end = "goes on" if drill.promise.codes == (0,) else "ends"
            words = (drill.role, drill.action, " ".join(drill.options), end)
            key = (*words, str(drill.again), str(drill.promise.right))
            groups.setdefault(key, []).append(drill)
    kept = sum(not record["broken"] and not record["skipped"] for record in verdicts.values())
    environment = result["environment"]
    missing = len(drills()) - len(verdicts)
    rest = f" The other {missing} of the table have no kept result." if missing else ""
    lines = [
        f"{kept} of {len(verdicts)} drills ended as promised, on {environment['cpus']} cores, "
        f"{environment['date']}.{rest}",
        *(["", result["note"]] if "note" in result else []),
        "",
        "| struck | by | in | what happens | the output says | seconds |",
        "|---|---|---|---|---|---|",
        *(_row(group, [verdicts[drill.name] for drill in group]) for group in groups.values()),
        "",
    ]
    return "\n".join(lines)


def _row(group: Sequence[Drill], records: Sequence[Record]) -> str:
    first = group[0]
    action = first.action + (f", with `{' '.join(first.options)}`" if first.options else "")
    named = sorted({text for record in records for text in record["named"]})
    shown = "; ".join(_cell(text) for text in named[:2])
    cells = [first.role, action, _where(group), _end(group, records), shown, _seconds(records)]
    return f"| {' | '.join(cells)} |"


def _where(group: Sequence[Drill]) -> str:
    """The settings, each with its phases."""
    phases: dict[str, list[str]] = {}
    for drill in group:
        phases.setdefault(drill.setting, []).append(drill.phase)
    parts = []
    for setting, where in phases.items():
        named = [phase for phase in where if phase]
        parts.append(f"`{setting}`" + (f" ({', '.join(named)})" if named else ""))
    return ", ".join(parts)


def _end(group: Sequence[Drill], records: Sequence[Record]) -> str:
    codes = sorted({record["code"] for record in records if record["code"] is not None})
    text = "ends well" if codes == [0] else f"exit code {' or '.join(map(str, codes))}"
    if group[0].promise.right and codes == [0]:
        text += ", right weights"
    if group[0].again:
        text += "; started again, right weights"
    broken = [f"`{record['drill']}`" for record in records if record["broken"]]
    if broken:
        text += f". **Not as promised**: {', '.join(broken)}"
    return text


def _seconds(records: Sequence[Record]) -> str:
    """To the end of the job, or until training goes on."""
    found = [
        record["recovery_seconds"] if record["recovery_seconds"] is not None else record["seconds"]
        for record in records
        if record["seconds"] is not None
    ]
    if not found:
        return ""
    low, high = f"{min(found):.1f}", f"{max(found):.1f}"
    return low if low == high else f"{low}–{high}"


def _cell(text: str) -> str:
    return "“" + text.replace("|", "\\|").replace("\n", " ").strip() + "”"
