"""Network namespaces that are found again when their maker is gone.

A named namespace stays until somebody deletes it, so a maker that is killed outright leaves it
behind, with whatever runs in it. The name therefore says who made it, and whoever comes next can
tell the namespaces of the living from those of the dead:

    farandole-<process id>-<its start time>-<which cluster>-<which host>

The start time is there because process ids are used again. A maker's watchdog does so as soon as
the maker is killed.
"""

from __future__ import annotations

import os
import re
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from farandole.errors import LaunchError, UserError

CLEAN = (sys.executable, "-m", "farandole", "emulate", "--clean")
"""The command that removes what killed makers have left."""

_NAME = re.compile(r"farandole-(\d+)-(\d+)-[0-9a-f]+-\w+")
_END_SECONDS = 10.0
_CAPABILITIES = {"CAP_NET_ADMIN": 12, "CAP_SYS_ADMIN": 21}  # <linux/capability.h>
_PACKAGES = {
    "ip": "iproute2",
    "tc": "iproute2",
    "nsenter": "util-linux",
    "unshare": "util-linux",
    "mount": "mount",
}


def require_root() -> None:
    """Raises `UserError` that says what is missing to make namespaces here, and how to get it."""
    if not sys.platform.startswith("linux"):
        raise UserError(f"emulated hosts are network namespaces of Linux; this is {sys.platform}.")
    if os.geteuid() != 0:
        again = shlex.join(["sudo", sys.executable, *sys.orig_argv[1:]])
        raise UserError(f"emulated hosts need root to make network namespaces. Run: {again}")
    lacking = missing_capabilities(Path("/proc/self/status").read_text())
    if lacking:
        options = " ".join(f"--cap-add {name[len('CAP_') :]}" for name in lacking)
        raise UserError(
            f"emulated hosts need {' and '.join(lacking)}, which root does not have here. "
            f"In a container? Start it with: docker run {options} …"
        )
    absent = [tool for tool in _PACKAGES if shutil.which(tool) is None]
    if absent:
        packages = " ".join(sorted({_PACKAGES[tool] for tool in absent}))
        raise UserError(
            f"emulated hosts need the command(s) {', '.join(absent)}, not found in PATH. "
            f"On Debian: apt install {packages}"
        )


def missing_capabilities(process_status: str) -> list[str]:
    """Which of the needed ones a process lacks, from the text of its /proc/…/status."""
    found = re.search(r"^CapEff:\s*([0-9a-f]+)$", process_status, re.MULTILINE)
    effective = int(found[1], 16) if found else 0
    return [name for name, bit in _CAPABILITIES.items() if not effective >> bit & 1]


def call(*command: str) -> str:
    """Runs `ip` or `tc` and returns what it printed. Raises `LaunchError` with its complaint.

    In a session of its own: Ctrl-C must not stop it half-way.
    """
    done = subprocess.run(command, capture_output=True, text=True, start_new_session=True)
    if done.returncode != 0:
        raise LaunchError(f"`{shlex.join(command)}` failed: {done.stderr.strip()}")
    return done.stdout


def new_prefix() -> str:
    """What the names of one new cluster of this process begin with."""
    pid = os.getpid()
    return f"farandole-{pid}-{_start_time(pid)}-{secrets.token_hex(2)}-"


def existing(prefix: str = "farandole-") -> list[str]:
    """The namespaces of this machine whose names begin so."""
    names = [line.split()[0] for line in call("ip", "netns", "list").splitlines() if line.strip()]
    return [name for name in names if name.startswith(prefix)]


def is_leftover(name: str) -> bool:
    """Whether `name` is one of ours whose maker no longer runs."""
    made_by = _NAME.fullmatch(name)
    return made_by is not None and _start_time(int(made_by[1])) != made_by[2]


def remove_leftovers() -> list[str]:
    """Removes what makers that no longer run have left, and returns the names."""
    left = [name for name in existing() if is_leftover(name)]
    remove(left)
    return left


def remove(names: Sequence[str]) -> None:
    """Kills every process in these namespaces and deletes them, with the links between them.

    Raises `LaunchError` naming processes that do not end; their namespaces are deleted when they
    do.
    """
    surviving = _kill_all(names)
    for name in names:
        # Another emulator may be removing the same leftover: what counts is that it is gone.
        subprocess.run(["ip", "netns", "delete", name], capture_output=True, start_new_session=True)
    left = sorted(set(existing()) & set(names))
    if surviving or left:
        raise LaunchError(
            f"emulated hosts could not be removed: processes {surviving}, namespaces {left} stay. "
            "Try again with: farandole emulate --clean"
        )


def _kill_all(names: Sequence[str]) -> list[int]:
    """Kills until nobody is left, for a process may have started another meanwhile."""
    deadline = time.monotonic() + _END_SECONDS
    while True:
        running = _processes_in(names)
        if not running or time.monotonic() > deadline:
            return running
        for pid in running:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.01)


def _processes_in(names: Iterable[str]) -> list[int]:
    """Those whose network is one of these namespaces, whoever started them. Zombies have none."""
    found: list[int] = []
    for name in names:
        done = subprocess.run(
            ["ip", "netns", "pids", name], capture_output=True, text=True, start_new_session=True
        )
        found += [int(pid) for pid in done.stdout.split()]
    return found


def _start_time(pid: int) -> str | None:
    """When a process started, in the kernel's ticks since boot; None if it does not run."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = status.rpartition(")")[2].split()  # the name before it may hold spaces
    state, start_time = fields[0], fields[19]
    return None if state in "ZX" else start_time
