"""What a host says of itself, so that it can be compared with another. Nothing here imports torch.

Reading the versions from the installed packages takes milliseconds, importing them seconds.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import farandole
from farandole.launch.backends.remote.json_record import JsonRecord
from farandole.system.cores import usable_cores

_CHUNK_BYTES = 2**20


@dataclass(frozen=True)
class JobFiles:
    """What a job needs on every host. Paths are absolute, or relative to `folder`."""

    folder: str  # in which the workers start
    script: str | None = None  # None: a module
    others: Sequence[str] = ()  # that may be copies
    shared: Sequence[str] = ()  # that must be the very files of this host


@dataclass(frozen=True)
class HostFacts(JsonRecord):
    """Of one host, for one job."""

    python: str
    torch: str | None  # None: it is not installed
    farandole: str
    cores: int
    gpus: int
    clock_seconds: float  # since the epoch
    folder_exists: bool = True  # the folder in which the workers start
    script: str | None = None  # the digest of the script; None: there is no such file
    missing: Sequence[str] = ()  # further files of the job that cannot be seen from there
    no_way_back: str | None = None  # why it cannot connect to the launcher, if it was asked to


def facts_of_this_host(
    files: JobFiles, environ: Mapping[str, str] = os.environ, no_way_back: str | None = None
) -> HostFacts:
    """Reads the script, which may be on a slow disk. `environ` is that of the workers."""
    folder = Path(files.folder)
    further = (*files.others, *files.shared)
    return HostFacts(
        python=platform.python_version(),
        torch=_version("torch"),
        farandole=farandole.__version__,
        cores=usable_cores(),
        gpus=count_gpus(environ),
        clock_seconds=time.time(),
        folder_exists=folder.is_dir(),
        script=None if files.script is None else _digest(folder / files.script),
        missing=[path for path in further if not (folder / path).is_file()],
        no_way_back=no_way_back,
    )


def script_of(program: str, command: Sequence[str]) -> str | None:
    """The file that a job's command runs; None for modules, and for programs that are no Python."""
    if not Path(program).name.startswith("python") or not command or command[0].startswith("-"):
        return None
    return command[0]


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def count_gpus(environ: Mapping[str, str]) -> int:
    """NVIDIA's, by the driver's files: torch would take seconds to import."""
    there = len(list(Path("/dev").glob("nvidia[0-9]*")))
    chosen = environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return there
    return min(there, len([each for each in chosen.split(",") if each.strip() not in ("", "-1")]))


def _digest(path: Path) -> str | None:
    """Of a file's content; None where it cannot be read."""
    found = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                found.update(chunk)
    except OSError:
        return None
    return found.hexdigest()
