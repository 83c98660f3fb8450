"""What is left after a job: processes, shared memory, sockets, network namespaces and files."""

from __future__ import annotations

import re
import subprocess
import time
from pathlib import Path

from faults.place import Place
from faults.prepare import checkpoints_of

_OF_TORCH = "torchinductor_"  # a folder that importing torch's compiler makes, and keeps
_SETTLE_SECONDS = 3.0  # the kernel ends the children of a killed launcher, but not at once


def leftovers(place: Place, launcher_pid: int, may_leave: tuple[str, ...]) -> list[str]:
    """Everything of a job that has ended and is still there, each with its kind."""
    found = [
        *_processes(place),
        *_shared_memory(place),
        *_namespaces(launcher_pid),
        *_files(place),
    ]
    return [one for one in found if not any(re.search(pattern, one) for pattern in may_leave)]


def _processes(place: Place) -> list[str]:
    end = time.monotonic() + _SETTLE_SECONDS
    while (left := place.processes()) and time.monotonic() < end:
        time.sleep(0.05)
    found = []
    for process in left:
        try:
            words = " ".join(process.cmdline())
            status = process.status()
        except Exception:
            continue
        found.append(f"process: {status} {words[-80:]}")
    return found


def _shared_memory(place: Place) -> list[str]:
    return [f"segment: {path.name}" for path in place.shared.iterdir()]


def _namespaces(launcher_pid: int) -> list[str]:
    try:
        done = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return []
    names = [line.split()[0] for line in done.stdout.splitlines() if line.strip()]
    return [f"namespace: {name}" for name in names if name.startswith(f"farandole-{launcher_pid}-")]


def _files(place: Place) -> list[str]:
    """In the temporary folder, and half a checkpoint. What the output names is kept on purpose."""
    said = place.said()
    found = []
    for path in place.temporary.iterdir():
        if str(path) not in said and not path.name.startswith(_OF_TORCH):
            found.append(f"{_kind(path)}: tmp/{path.name}")
    checkpoints = checkpoints_of(place.folder)
    if checkpoints.is_dir():
        for path in checkpoints.glob(".*tmp*"):
            found.append(f"file: checkpoints/{path.name}")
    return found


def _kind(path: Path) -> str:
    if path.is_socket() or (path.is_dir() and any(each.is_socket() for each in path.rglob("*"))):
        return "socket"
    return "file"
