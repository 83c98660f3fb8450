"""How ranks of one host find the store that rank 0 serves: by a file that can be trusted.

Its folder belongs to this user alone, so nobody else can point ranks at a store of his own, or
connect to the socket, which is in the same folder.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import socket
import stat
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import psutil

from farandole.errors import JoinError
from farandole.worker.environment import RankAssignment
from farandole.worker.store.unix_path import short_path

_POLL_SECONDS = 0.01


class Announcement:
    """Of one job. Raises `JoinError` where the folder is not private."""

    def __init__(self, assignment: RankAssignment) -> None:
        self._rank = assignment.rank
        self._folder = _private_folder()
        # Ranks set by hand have no job but their port in common.
        port = assignment.port if assignment.launcher == "torchrun" else ""
        job = f"{assignment.launcher}/{assignment.job}/{port}"
        self._file = self._folder / f"{hashlib.sha256(job.encode()).hexdigest()[:16]}.json"

    def new_socket(self) -> Path:
        """Where to listen. Removes what rank 0 of a job that was killed has left."""
        for path in self._folder.glob("*.socket"):
            with contextlib.suppress(OSError):
                if _is_abandoned(path):
                    path.unlink()
        return self._folder / f"{secrets.token_hex(8)}.socket"

    def write(self, path: Path) -> None:
        temporary = self._file.with_suffix(f".{os.getpid()}.tmp")
        own = psutil.Process()
        content = {"socket": path.name, "pid": own.pid, "started": own.create_time()}
        temporary.write_text(json.dumps(content))
        # In one step: a reader sees no file or all of it.
        temporary.replace(self._file)

    def read(self, timeout: timedelta) -> Path:
        """Waits for it. Raises `JoinError`."""
        deadline = time.monotonic() + timeout.total_seconds()
        while time.monotonic() < deadline:
            name = _announced(self._file)
            if name is not None:
                return self._folder / name
            time.sleep(_POLL_SECONDS)
        raise JoinError(
            f"rank {self._rank} waited {timeout.total_seconds():g} s for rank 0 to announce itself "
            f"in {self._file}. Did rank 0 fail before fd.init()? (All ranks of a host must have "
            "the same user and TMPDIR.)"
        )

    def remove(self) -> None:
        self._file.unlink(missing_ok=True)


def _private_folder() -> Path:
    folder = Path(tempfile.gettempdir()) / f"farandole-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    # Looked at after it was made, and without following a link: in /tmp somebody else may have made
    # the folder first, or a link of that name to a folder of his own.
    status = folder.lstat()
    private = stat.S_ISDIR(status.st_mode) and not status.st_mode & 0o077
    if status.st_uid != os.getuid() or not private:
        raise JoinError(f"{folder} is not a private folder of this user. Remove it and try again.")
    return folder


def _announced(path: Path) -> str | None:
    """The socket in the file. None if it was left by a job that crashed: its writer is gone, even
    if another process has the same id by now."""
    try:
        found = json.loads(path.read_text())
        writer = psutil.Process(int(found["pid"]))
        # The system's idea of when it booted, and with it this time, wanders a little.
        alive = abs(writer.create_time() - float(found["started"])) < 2.0
        return Path(found["socket"]).name if alive else None
    except (FileNotFoundError, ValueError, KeyError, TypeError, psutil.Error):
        return None


def _is_abandoned(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe, short_path(path) as address:
        probe.setblocking(False)
        try:
            probe.connect(address)
        except ConnectionRefusedError:
            return True
        except OSError:
            return False
    return False
