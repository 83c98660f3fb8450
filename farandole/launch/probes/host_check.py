"""Whether a host can take part in a job: its versions, the script, its clock, the way back.

A host says its facts; the launcher compares them with its own, before any worker starts. Each
problem names the host and the next step. Nothing here imports torch, or opens a connection.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from farandole.errors import UserError
from farandole.launch.host_facts import HostFacts, JobFiles
from farandole.launch.probes.problems import Problem, Severity

CLOCK_WARNING_SECONDS = 1.0
CLOCK_LIMIT_SECONDS = 1800.0  # an hour off is refused; so is a time zone of half an hour

_OPEN_PORTS = (
    "Let it connect to this host (firewall), or name the interface that the hosts share: "
    "--network-interfaces eth0"
)


def compare(
    host: str, there: HostFacts, here: HostFacts, files: JobFiles, clock_offset_seconds: float
) -> list[Problem]:
    """What is wrong at `host`, compared with this one. The offset is its clock less ours."""
    return [
        *_versions(host, there, here),
        *_files(host, there, here, files),
        *_clock(host, clock_offset_seconds),
        *_way_back(host, there),
    ]


def _versions(host: str, there: HostFacts, here: HostFacts) -> list[Problem]:
    problems: list[Problem] = []
    if there.torch is None and here.torch is not None:
        advice = f"pip install torch=={here.torch} there."
        problems.append(Problem(host, "error", "torch is not installed there.", advice))
    pairs = {
        "Python": (there.python, here.python),
        "torch": (there.torch, here.torch),
        "Farandole": (there.farandole, here.farandole),
    }
    for name, (theirs, ours) in pairs.items():
        if theirs is None or ours is None or theirs == ours:
            continue
        severity: Severity = (
            "error" if _release(name, theirs) != _release(name, ours) else "warning"
        )
        problems.append(
            Problem(
                host,
                severity,
                f"it has {name} {theirs}, and this host has {ours}.",
                "Install the same version on all hosts.",
            )
        )
    return problems


def _release(name: str, version: str) -> str:
    """The part that must agree: of Python 3.11.2 it is 3.11, of torch 2.10.0+cpu it is 2.10.0."""
    if name == "Python":
        return ".".join(version.split(".")[:2])
    return version.partition("+")[0]


def _files(host: str, there: HostFacts, here: HostFacts, files: JobFiles) -> list[Problem]:
    same_path = "at the same path, or start the job in a folder that all hosts share"
    if not there.folder_exists:
        return [
            Problem(
                host,
                "error",
                f"there is no folder {files.folder}.",
                f"Copy the job's files there, {same_path}.",
            )
        ]
    problems: list[Problem] = []
    if files.script is not None and there.script is None:
        text = f"the script {files.script} is not there (in {files.folder})."
        problems.append(Problem(host, "error", text, f"Copy it there, {same_path}."))
    elif files.script is not None and here.script is not None and there.script != here.script:
        text = f"the script {files.script} has another content there (in {files.folder})."
        problems.append(Problem(host, "error", text, "Copy this host's there."))
    for path in there.missing:
        if path in files.shared:
            text = f"it does not see this host's folder {Path(files.folder, path).parent}."
            problems.append(Problem(host, "error", text, "Name a folder that all hosts share."))
        else:
            text = f"there is no file {path} (from {files.folder})."
            problems.append(Problem(host, "error", text, f"Copy it there, {same_path}."))
    return problems


def _clock(host: str, offset: float) -> list[Problem]:
    if abs(offset) <= CLOCK_WARNING_SECONDS:
        return []
    way = "ahead of" if offset > 0 else "behind"
    return [
        Problem(
            host,
            "error" if abs(offset) >= CLOCK_LIMIT_SECONDS else "warning",
            f"its clock is {_duration(abs(offset))} {way} this host's.",
            "Set it, and keep it right with NTP: timedatectl set-ntp true",
        )
    ]


def least_offset_seconds(there: float, earliest: float, latest: float) -> float:
    """How far another clock, read between two readings of ours, is ahead of ours at the least."""
    return there - latest if there > latest else min(0.0, there - earliest)


def _way_back(host: str, there: HostFacts) -> list[Problem]:
    if there.no_way_back is None:
        return []
    text = f"it cannot connect to this host at {there.no_way_back}."
    return [Problem(host, "error", text.replace("..", "."), _OPEN_PORTS)]


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} minutes" if seconds < 7200 else f"{seconds / 3600:.1f} hours"


@contextmanager
def marker(folder: Path) -> Iterator[str]:
    """A new file in `folder`, for `JobFiles.shared`: a host that sees it sees this very folder.

    Raises `UserError` where it cannot be written.
    """
    try:
        descriptor, name = tempfile.mkstemp(dir=folder, prefix=".farandole-")
    except OSError as error:
        raise UserError(f"{folder} cannot be written to: {error}. Name another folder.") from error
    os.close(descriptor)
    path = Path(name).absolute()
    try:
        yield str(path)
    finally:
        path.unlink(missing_ok=True)
