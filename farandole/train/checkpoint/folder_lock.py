"""One job at a time saves into a folder of checkpoints.

    runs/digits/checkpoints/.lock     {"process": 4242, "host": "node7", "since": "2026-01-31T…"}

The lock is the kernel's (`flock`), so it ends with the process that holds it, however that ends.
What is written in the file is only for the message to whoever comes second.

- Children must not keep it: programs that are started close it (`O_CLOEXEC`), and a process that
  was forked closes its copy before anything else. A DataLoader's worker that outlives a killed
  rank therefore keeps nobody out.
- All runs of a process share one lock: they are one job. The folder may have several paths; the
  file's identity tells.
- The file is removed when the lock is given back. Whoever has opened it before that holds a lock
  on a file without a name, notices, and tries again.
- Some file systems have no locks. Saving goes on there without: names of checkpoints are unique.
"""

from __future__ import annotations

import errno
import json
import os
import socket
import threading
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from farandole.errors import CheckpointError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

NAME: Final = ".lock"

_NO_LOCKS: Final = frozenset(
    {errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL, errno.EBADF}
)
_LONGEST_NOTE: Final = 1000  # bytes of the file that are read: anybody may have written it

_Identity = tuple[int, int]


@dataclass
class _Lock:
    """The kernel's lock, and how many runs of this process use it."""

    handle: int
    users: int = 1


class _Held:
    """The locks of this process. A forked process begins with none.

    No fork comes between opening a file and knowing of it: the child would keep the lock.
    """

    def __init__(self) -> None:
        self.guard = threading.Lock()
        self.locks: dict[_Identity, _Lock] = {}
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(
                before=lambda: self.guard.acquire(),
                after_in_parent=lambda: self.guard.release(),
                after_in_child=self._close_copies,
            )

    def _close_copies(self) -> None:
        for lock in self.locks.values():
            os.close(lock.handle)  # the parent's descriptor, and with it the lock, stays
        self.guard = threading.Lock()
        self.locks = {}


_HELD: Final = _Held()


@dataclass
class FolderLock:
    """A run's hold on `folder`, until `release`."""

    folder: Path
    first: bool  # no other run of this process had it: what is half-written there is a dead one's
    missing: str | None = None  # why there is no lock at all, where the file system has none
    _identity: _Identity | None = None
    _process: int = field(default_factory=os.getpid)

    def is_valid(self) -> bool:
        """Not after the folder was removed, nor in a process that was forked."""
        if self.missing is not None:
            return True
        return self._process == os.getpid() and _identity_of(self.folder / NAME) == self._identity

    def release(self) -> None:
        """Gives the lock back, unless another run of this process has it too."""
        if self._identity is None or self._process != os.getpid():
            return
        identity, self._identity = self._identity, None
        with _HELD.guard:
            lock = _HELD.locks[identity]
            lock.users -= 1
            if lock.users:
                return
            del _HELD.locks[identity]
            # The name goes before the lock. In the other order another process could take the lock
            # in between, and its file would be removed under it.
            if _identity_of(self.folder / NAME) == identity:
                (self.folder / NAME).unlink(missing_ok=True)
            os.close(lock.handle)


def lock(folder: Path) -> FolderLock:
    """Keeps other jobs from saving into `folder`, which exists.

    Raises `CheckpointError` naming the process that has it, or `OSError`.
    """
    folder = folder.resolve()
    while True:
        try:
            with _HELD.guard:
                taken = _take(folder)
        except BlockingIOError as error:
            raise CheckpointError(_in_use(folder)) from error
        if taken is not None:
            return taken


def _take(folder: Path) -> FolderLock | None:
    """None: its holder has just removed the file. Raises `BlockingIOError` if it has not."""
    handle = _open(folder / NAME)
    keep = False
    try:
        found = os.fstat(handle)
        identity = (found.st_dev, found.st_ino)
        known = _HELD.locks.get(identity)
        if known is not None:  # `handle` is another descriptor than the one that is locked
            known.users += 1
            return FolderLock(folder, first=False, _identity=identity)
        _flock(handle)
        # Between opening and locking, the last holder may have removed the file. This lock is then
        # on a file that nobody else can open: it excludes no one.
        if _identity_of(folder / NAME) != identity:
            return None
        _sign(handle)
        _HELD.locks[identity] = _Lock(handle)
        keep = True
        return FolderLock(folder, first=True, _identity=identity)
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return FolderLock(folder, first=False, missing=str(error))
        raise
    finally:
        if not keep:
            os.close(handle)


def _flock(handle: int) -> None:
    if fcntl is None:
        raise OSError(errno.ENOSYS, "this system has no flock")
    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _open(path: Path) -> int:
    """Another user's file can be locked without the right to write to it."""
    safe = os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | safe, 0o644)
    except PermissionError:
        return os.open(path, os.O_RDONLY | safe)


def _identity_of(path: Path) -> _Identity | None:
    try:
        found = path.stat(follow_symlinks=False)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _sign(handle: int) -> None:
    """Who holds it. A full disk is no reason not to."""
    since = datetime.now(UTC).isoformat(timespec="seconds")
    note = {"process": os.getpid(), "host": socket.gethostname(), "since": since}
    try:
        os.ftruncate(handle, 0)
        os.pwrite(handle, json.dumps(note).encode(), 0)
    except OSError:
        pass


def _in_use(folder: Path) -> str:
    return (
        f"{_holder(folder / NAME)} saves into {folder}, and one job at a time may. End it, or give "
        "this job a folder of its own: --name, fd.init(name=…), or another path."
    )


def _holder(path: Path) -> str:
    for _ in range(10):  # it signs right after it has locked
        try:
            note = json.loads(path.read_bytes()[:_LONGEST_NOTE])
            since = datetime.fromisoformat(note["since"]).isoformat(sep=" ", timespec="seconds")
            return f"process {int(note['process'])} on {str(note['host'])!r}, since {since},"
        except (OSError, ValueError, TypeError, LookupError, RecursionError):
            time.sleep(0.02)
    return "another process, which has not left its name,"
