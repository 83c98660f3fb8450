"""Whether a host can take part in a job: its versions, the script, its clock, its cores and GPUs.

The host says its facts; the launcher compares them with its own, before any worker starts. Each
problem names the host and the next step. Nothing here imports torch, or opens a connection.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

import farandole
from farandole.errors import LaunchError, UserError
from farandole.system.cores import usable_cores

CLOCK_WARNING_SECONDS = 1.0
CLOCK_LIMIT_SECONDS = 1800.0  # an hour off is refused; so is a time zone of half an hour

Severity = Literal["warning", "error"]
_CHUNK_BYTES = 2**20


@dataclass(frozen=True)
class HostFacts:
    """What a host says of itself. `script` is the digest of the job's script there."""

    python: str
    torch: str | None  # None: not installed
    farandole: str
    cores: int
    gpus: int
    folder_exists: bool = True  # the folder in which the workers start
    script: str | None = None  # None: there is no such file
    missing: tuple[str, ...] = ()  # further files of the job that cannot be seen from there

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, said: Mapping[str, Any]) -> HostFacts:
        """Raises `LaunchError` for what no host of this version says."""
        try:
            known = {field.name: said[field.name] for field in fields(cls)}
            return cls(**{**known, "missing": tuple(known["missing"])})
        except (KeyError, TypeError) as error:
            raise LaunchError(f"a host describes itself in another way: {error!r}.") from error


@dataclass(frozen=True)
class JobFiles:
    """What a job needs on every host. Paths are absolute, or relative to `folder`."""

    folder: str  # in which the workers start
    script: str | None = None  # None: a module
    others: tuple[str, ...] = ()  # that may be copies
    shared: tuple[str, ...] = ()  # that must be the very files of this host


@dataclass(frozen=True)
class Problem:
    """`text` says what is wrong, in whole sentences; `advice` what to do, if `text` does not."""

    host: str
    severity: Severity
    text: str
    advice: str

    def __str__(self) -> str:
        return f"host {self.host}: {self.text} {self.advice}".rstrip()


def facts_here(files: JobFiles) -> HostFacts:
    """The facts of this host. Reads the script, which may be on a slow disk."""
    script = None if files.script is None else digest(Path(files.folder, files.script))
    return HostFacts(
        python=platform.python_version(),
        torch=_torch_version(),
        farandole=farandole.__version__,
        cores=usable_cores(),
        gpus=_gpu_count(os.environ),
        folder_exists=Path(files.folder).is_dir(),
        script=script,
        missing=tuple(path for path in _further(files) if not Path(files.folder, path).is_file()),
    )


def _further(files: JobFiles) -> tuple[str, ...]:
    return (*files.others, *files.shared)


def compare(
    host: str, there: HostFacts, here: HostFacts, files: JobFiles, clock_offset_seconds: float
) -> list[Problem]:
    """What is wrong at `host`, compared with this one. The offset is its clock less ours."""
    return [
        *_versions(host, there, here),
        *_files(host, there, here, files),
        *_clock(host, clock_offset_seconds),
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
    elif files.script is not None and there.script != here.script:
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


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} minutes" if seconds < 7200 else f"{seconds / 3600:.1f} hours"


def crowding(host: str, workers: int, cores: int, gpus: int) -> list[Problem]:
    """Warnings where a host gets more workers than it has GPUs, or else cores."""
    kind, count = ("GPU", gpus) if gpus else ("core", cores)
    if workers <= count:
        return []
    text = f"{workers} workers share {count} {kind}{'s' if count != 1 else ''}."
    return [Problem(host, "warning", text, f"Give it at most {count}: {host}:{count}")]


def require(problems: Sequence[Problem]) -> None:
    """Raises `LaunchError` with all errors among `problems`."""
    errors = [str(problem) for problem in problems if problem.severity == "error"]
    if errors:
        raise LaunchError("the job was not started.\n" + "\n".join(errors))


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


def digest(path: Path) -> str | None:
    """Of a file's content; None where it cannot be read."""
    found = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                found.update(chunk)
    except OSError:
        return None
    return found.hexdigest()


def _torch_version() -> str | None:
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return None


def _gpu_count(environ: Mapping[str, str]) -> int:
    """NVIDIA's, by the driver's files: torch would take seconds to import."""
    there = len(list(Path("/dev").glob("nvidia[0-9]*")))
    chosen = environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return there
    return min(there, len([each for each in chosen.split(",") if each.strip() not in ("", "-1")]))
