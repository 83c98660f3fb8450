"""What a host says of itself, so that it can be compared with another. Nothing here imports torch.

Reading the versions from the installed packages takes milliseconds, importing them seconds.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import farandole
from farandole.launch.backends.remote.json_record import JsonRecord
from farandole.system.cores import usable_cores

_NVIDIA_GPUS = Path("/proc/driver/nvidia/gpus")


@dataclass(frozen=True)
class HostFacts(JsonRecord):
    """Of one host, for one job."""

    python: str
    torch: str | None  # None: it is not installed
    farandole: str
    cores: int
    gpus: int | None  # None: the system does not say
    clock_seconds: float  # since the epoch
    script_digest: str | None  # None: the job's command names no script, or it is not there


def facts_of_this_host(script: Path | None) -> HostFacts:
    """`script` is the one that the job runs, if it is a file."""
    return HostFacts(
        platform.python_version(),
        _version("torch"),
        farandole.__version__,
        usable_cores(),
        _count_gpus(),
        time.time(),
        _digest(script),
    )


def script_of(program: str, command: Sequence[str], folder: Path) -> Path | None:
    """The file that a job's command runs; None for modules, and for programs that are no Python."""
    if not Path(program).name.startswith("python") or not command or command[0].startswith("-"):
        return None
    return folder / command[0]


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _count_gpus() -> int | None:
    try:
        return sum(1 for _ in _NVIDIA_GPUS.iterdir())
    except OSError:
        return None


def _digest(script: Path | None) -> str | None:
    if script is None:
        return None
    try:
        return hashlib.sha256(script.read_bytes()).hexdigest()
    except OSError:
        return None
