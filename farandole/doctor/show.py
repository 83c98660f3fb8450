"""Shows findings as lines or as a table, with a verdict."""

from __future__ import annotations

import shutil
from collections.abc import Sequence

from farandole.doctor.checks import Finding

_COLOURS = (("ok", "green"), ("warning", "yellow"), ("missing", "cyan"), ("broken", "red"))


def plain_lines(findings: Sequence[Finding]) -> list[str]:
    """One line for each finding, in columns; what to do follows an arrow."""
    width = max(len(finding.name) for finding in findings)
    return [
        f"{finding.status:<8} {finding.name:<{width}}  {finding.value}"
        + (f"  → {finding.hint}" if finding.hint else "")
        for finding in findings
    ]


def verdict(findings: Sequence[Finding]) -> str:
    broken = [finding.name for finding in findings if finding.status == "broken"]
    if broken:
        return f"Farandole cannot work here yet. Broken: {', '.join(broken)}."
    counts = {kind: sum(f.status == kind for f in findings) for kind in ("warning", "missing")}
    return (
        f"Everything that Farandole needs works. Warnings: {counts['warning']}; "
        f"optional and missing: {counts['missing']}."
    )


def print_table(findings: Sequence[Finding]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    colours = dict(_COLOURS)
    table = Table(box=None, pad_edge=False)
    for heading in ("", "what", "found", "how to get it"):
        table.add_column(heading, overflow="fold")
    for finding in findings:
        # Text, not markup: a value may hold square brackets.
        table.add_row(
            Text(finding.status, style=colours[finding.status]),
            *map(Text, (finding.name, finding.value, finding.hint)),
        )
    Console(width=max(shutil.get_terminal_size().columns, 60), highlight=False).print(table)
