"""Which processes a role means."""

from __future__ import annotations

import psutil

from faults.place import Place
from faults.table import Drill


class MissingError(Exception):
    """There is no such process: the harness, or the table, is wrong."""


def targets(drill: Drill, place: Place) -> list[psutil.Process]:
    """Those that a drill's action is for. A launcher is the one that was started first."""
    role = drill.role
    if role == "launcher":
        return [psutil.Process(place.started[0].pid)]
    if role.startswith(("rank ", "member ")):
        return [process_of(drill.phase, int(role.split()[1]), place)]
    if role == "a lane's launcher":
        return [_parent(process_of(drill.phase, 0, place))]
    if role.startswith("loader's"):
        return process_of(drill.phase, 1, place).children()[:1]
    word = {"a server": "farandole.server", "the fork server": "fork_server"}.get(role)
    if word is None:
        return []
    found = [process for process in place.processes() if word in " ".join(process.cmdline())]
    if not found:
        raise MissingError(f"no process of this job is {role}")
    return sorted(found, key=lambda process: process.create_time())[-1:]


def process_of(phase: str, rank: int, place: Place) -> psutil.Process:
    """The process that has said of itself that it is this rank."""
    reached = place.folder / f"reached-{phase.replace(' ', '_')}-{rank}"
    return psutil.Process(int(reached.read_text()))


def _parent(process: psutil.Process) -> psutil.Process:
    parent = process.parent()
    if parent is None:
        raise MissingError(f"{process} has no parent")
    return parent
