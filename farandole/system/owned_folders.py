"""Temporary folders that are recognised as nobody's when their owner was killed.

The owner holds a lock in its folder as long as it lives; the kernel releases it. So a folder whose
lock can be taken was left by a process that is gone, and the next job removes it. One that is to
stay, as the logs of a failed job do, has no lock any more.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

PREFIX = "farandole-"
SOCKETS = "mps"
_LOCK = "launcher.lock"
# A Unix socket's path has at most 107 bytes, of which the names of our folders and of the daemon's
# sockets in them take up to 59.
_LONGEST_FOR_SOCKETS = 48
_SHORT = Path("/tmp")


class OwnedFolder:
    """A new folder `farandole-<purpose>-…`, private to this user, of the `job` with this identity.

    It is in `parent`, or in the temporary folder. Raises `OSError` where none can be made.
    """

    def __init__(self, purpose: str, job: str = "", *, parent: Path | None = None) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{purpose}-", dir=parent))
        draft = self.path / f".{_LOCK}"
        self._lock: int | None = os.open(draft, os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        os.write(self._lock, job.encode())
        draft.rename(self.path / _LOCK)  # it has the name when it is held: nobody takes it before

    def close(self, *, keep: bool = False) -> None:
        """The owner needs it no more. It is removed, unless it is to be kept."""
        if self._lock is None:
            return
        if keep:
            with contextlib.suppress(OSError):
                (self.path / _LOCK).unlink()
        else:
            shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)
        self._lock = None


def folder_for_sockets(temporary: Path | None = None) -> Path:
    """The temporary folder, or where that has too long a path for sockets, /tmp."""
    folder = Path(tempfile.gettempdir()) if temporary is None else temporary
    return folder if len(os.fsencode(folder)) <= _LONGEST_FOR_SOCKETS else _SHORT


def own_folders(temporary: Path | None = None) -> Iterator[Path]:
    """The folders of this user's jobs, those of living ones among them. Links are no folders."""
    folder = Path(tempfile.gettempdir()) if temporary is None else temporary
    short = folder_for_sockets(folder)
    sockets = short.glob(f"{PREFIX}{SOCKETS}-*") if short != folder else ()
    for path in itertools.chain(folder.glob(f"{PREFIX}*-*"), sockets):
        with contextlib.suppress(OSError):  # removed meanwhile
            found = path.lstat()
            if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid():
                yield path


def is_abandoned(path: Path) -> bool:
    """Whether its owner was killed: there is a lock, and nobody holds it."""
    try:
        with (path / _LOCK).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (FileNotFoundError, BlockingIOError):  # it was kept, or its owner lives
        return False
    return True


def is_owned(path: Path) -> bool:
    """Whether it has an owner, dead or alive, and was not kept."""
    return (path / _LOCK).exists()


def job_of(path: Path) -> str:
    """The identity of the job that an owned folder belongs to; empty if it has none."""
    return (path / _LOCK).read_text(errors="replace")
