"""The logs of failed jobs in the temporary folder: kept for a week, and never taken from a job.

A launcher holds a lock in its folder as long as it lives, so a folder that can be locked is
nobody's any more. Another user's are left alone.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
import time
from pathlib import Path

_PREFIX = "farandole-logs-"
_LOCK = "launcher.lock"
_KEEP_SECONDS = 7 * 86400.0


class LogFolder:
    """A new folder for the logs of one job. Raises `OSError` where none can be made."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX))
        self._lock = os.open(self.path / _LOCK, os.O_CREAT | os.O_RDWR)
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def close(self, *, keep: bool) -> None:
        """The job is over. What is kept stays for its week."""
        os.close(self._lock)
        if not keep:
            shutil.rmtree(self.path, ignore_errors=True)


def remove_old_logs(temporary: Path | None = None) -> list[Path]:
    """Removes what jobs of this user left more than a week ago; returns what was removed."""
    folder = Path(tempfile.gettempdir()) if temporary is None else temporary
    removed = []
    for path in folder.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # somebody else removes it too, or it is not ours
            if _is_old(path) and _is_nobodys(path):
                shutil.rmtree(path)
                removed.append(path)
    return removed


def _is_old(path: Path) -> bool:
    """A folder of ours in which nothing was written for a week. Links are not followed."""
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        return False
    written = max(found.st_mtime, *(inside.lstat().st_mtime for inside in path.iterdir()), 0.0)
    return time.time() - written > _KEEP_SECONDS


def _is_nobodys(path: Path) -> bool:
    lock = path / _LOCK
    if not lock.exists():  # before there were locks
        return True
    with lock.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True
