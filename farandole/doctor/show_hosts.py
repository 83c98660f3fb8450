"""Shows hosts and the links between them as two tables, then what is wrong."""

from __future__ import annotations

import shutil
import sys

from rich.console import Console
from rich.table import Table
from rich.text import Text

from farandole.doctor.hosts import HostsExamination
from farandole.launch.probes.host_check import CLOCK_WARNING_SECONDS
from farandole.launch.probes.survey import HostReport
from farandole.report import units

_HEADINGS = ("host", "Python", "torch", "Farandole", "cores", "GPUs", "clock", "to the launcher")
_NOT_A_TERMINAL_COLUMNS = 200  # a file has room, and a folded number would be misread


def print_hosts(found: HostsExamination) -> None:
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else _NOT_A_TERMINAL_COLUMNS
    console = Console(width=width, highlight=False)
    console.print(_hosts_table(found))
    if len(found.reports) > 1:
        console.print(_links_table(found))
    for problem in found.problems:
        style = "red" if problem.severity == "error" else "yellow"
        console.print(Text(f"{problem.severity}: {problem}", style=style), soft_wrap=True)
    console.print(Text(_verdict(found)), soft_wrap=True)


def _hosts_table(found: HostsExamination) -> Table:
    table = Table(box=None, pad_edge=False)
    for heading in _HEADINGS:
        table.add_column(heading, overflow="fold")
    bad = {problem.host for problem in found.problems if problem.severity == "error"}
    for report in found.reports:
        name = Text(report.host, style="bold red" if report.host in bad else "green")
        table.add_row(name, *map(Text, _cells(report)))
    return table


def _cells(report: HostReport) -> list[str]:
    facts, offset = report.facts, report.clock_offset_seconds
    if facts is None or offset is None:
        return [units.NONE] * (len(_HEADINGS) - 1)
    right = abs(offset) <= CLOCK_WARNING_SECONDS
    reached = report.to_launcher
    return [
        facts.python,
        facts.torch or "none",
        facts.farandole,
        str(facts.cores),
        str(facts.gpus),
        "right" if right else f"{offset:+.1f} s",
        units.NONE if reached is None else _milliseconds(reached.latency_seconds),
    ]


def _links_table(found: HostsExamination) -> Table:
    names = [report.host for report in found.reports]
    table = Table(box=None, pad_edge=False, title="bytes per second, and time of a message")
    table.title_justify = "left"
    table.add_column("from ↓  to →")
    for name in names:
        table.add_column(name, justify="right", overflow="fold")
    for sender in names:
        cells = [_link_cell(found, sender, receiver) for receiver in names]
        table.add_row(Text(sender), *map(Text, cells))
    return table


def _link_cell(found: HostsExamination, sender: str, receiver: str) -> str:
    figures = found.figures(sender, receiver)
    if sender == receiver or figures is None:
        return units.NONE
    return f"{units.bytes_count(figures[1])}/s, {_milliseconds(figures[0])}"


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1000:.3g} ms"


def _verdict(found: HostsExamination) -> str:
    hosts = len(found.reports)
    bad = sorted({problem.host for problem in found.problems if problem.severity == "error"})
    if bad:
        return f"{len(bad)} of {hosts} hosts cannot take part yet: {', '.join(bad)}."
    return (
        "This host can take part in a job."
        if hosts == 1
        else f"All {hosts} hosts can take part in a job."
    )
