"""Copies of shards on a local disk, shared by the ranks of a host and by several jobs.

    /local/disk/
      data/<key>.tar       a whole copy; when it was last used is its access time
      data/.<key>.part     being copied, or left by a crash
      records/<key>.json   what it is a copy of, its size and SHA-256; written before the copy
      locks/<key>          held by all who read the copy, or by the one who makes or removes it
      locks/room           held by who makes room

The key is made of the name and of the identity of a file, so a file that was written again is
another entry. A copy gets its name when it is complete and on the disk. The kernel's locks end with
their processes: whatever a crash leaves is nobody's, and is removed by the next who needs room.
Locks stay; they are empty, or hold the number of a process.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Final, NamedTuple

from farandole.data.chunks.files.shard_file import ShardFile
from farandole.errors import FarandoleError, UserError
from farandole.files import write_whole
from farandole.system.file_locks import file_lock

PATIENCE_SECONDS: Final = 120.0  # with somebody who copies a shard, and gets nowhere
ROOM_SECONDS: Final = 5.0  # for those who read the copies that would have to go
_HURRY_SECONDS: Final = 60.0  # after that was in vain: nobody waits again at every read
_PAUSE_SECONDS: Final = 0.02
_ATTEMPTS: Final = 5  # a copy may be removed again before we hold it, by who needs room too
_PIECE: Final = 4 << 20
_WRITTEN_NS: Final = 10**18  # of all copies alike: a copy that is made again is no other file
_FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class _Entry(NamedTuple):
    used_ns: int
    size: int
    path: Path


class ShardCache:
    """At most `limit` bytes in `folder`; None: as much as the disk holds."""

    def __init__(self, folder: Path, limit: int | None = None) -> None:
        if limit is not None and limit < 1:
            raise UserError(f"cache_limit={limit}: the cache needs room for at least one shard.")
        self.folder = folder.absolute()
        self.limit = limit
        self._waits_again = 0.0  # on the monotonic clock: not before, for room
        self._checked: set[str] = set()  # by this process, or by the one that it was forked from
        try:
            for name in ("data", "records", "locks"):
                (self.folder / name).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(
                f"cache={str(folder)!r} cannot be used: {error.strerror}. Choose a folder on a "
                "local disk that you may write to."
            ) from error

    @contextmanager
    def held(self, file: ShardFile) -> Iterator[Path | None]:
        """A whole copy, which stays there as long as the context lasts. None where there is no
        room for one; a warning has then said why."""
        key = _key(file)
        for _ in range(_ATTEMPTS):
            with contextlib.ExitStack() as stack:
                try:
                    stack.enter_context(self._lock(key, shared=True))
                except TimeoutError as error:
                    self._warn(file, str(error))
                    break
                copy = self._whole_copy(key, file)
                if copy is not None:
                    os.utime(copy, ns=(time.time_ns(), _WRITTEN_NS))
                    yield copy
                    return
            if not self._fetch(key, file):  # it may be gone again when we look: then once more
                break
        yield None

    def _whole_copy(self, key: str, file: ShardFile) -> Path | None:
        """None if there is none, or it is damaged. Its lock is held."""
        copy = self._data(key, file)
        try:
            if copy.stat().st_size != file.size:
                _warn_of_damage(file, copy, "size")
                return None
        except FileNotFoundError:
            return None
        if key in self._checked:
            return copy
        try:
            expected = json.loads(self._record(key).read_bytes())["sha256"]
        except (OSError, ValueError, KeyError, TypeError):
            return None  # a copy that nobody knows anything of
        with copy.open("rb") as opened:
            found = hashlib.file_digest(opened, "sha256").hexdigest()
        if found != expected:
            _warn_of_damage(file, copy, "checksum")
            return None
        self._checked.add(key)
        return copy

    def _fetch(self, key: str, file: ShardFile) -> bool:
        """Copies the file, unless somebody else has meanwhile. False if that cannot be.

        Raises `DataError` where the file itself cannot be read, or has changed.
        """
        if self.limit is not None and file.size > self.limit:
            self._warn(file, f"its {file.size} bytes are more than cache_limit={self.limit}")
            return False
        part = self._part(key)
        try:
            with self._lock(key, shared=False):
                if self._whole_copy(key, file) is None:
                    self._data(key, file).unlink(missing_ok=True)  # one that is damaged
                    try:
                        self._reserve(key, file.size)
                        self._copy(key, file, part)
                    finally:
                        part.unlink(missing_ok=True)
        except (TimeoutError, _NoRoomError) as error:
            self._warn(file, str(error))
            return False
        return True

    def _copy(self, key: str, file: ShardFile, part: Path) -> None:
        digest, copied = hashlib.sha256(), 0
        try:
            with part.open("r+b") as target:
                for piece in _pieces(file):
                    digest.update(piece)
                    target.write(piece)
                    copied += len(piece)
                target.flush()
                os.fsync(target.fileno())
        except OSError as error:  # of the disk of the cache: those of the file are `DataError`
            raise _NoRoomError(f"{self.folder}: {error.strerror}") from error
        file.check()  # what was copied is what the job began with
        if copied != file.size:
            raise file.has_changed(copied)
        os.utime(part, ns=(time.time_ns(), _WRITTEN_NS))
        about = {"name": file.name, "size": copied, "sha256": digest.hexdigest()}
        try:
            write_whole(self._record(key), json.dumps(about).encode())
        except FarandoleError as error:
            raise _NoRoomError(str(error)) from error
        part.replace(self._data(key, file))

    def _reserve(self, key: str, size: int) -> None:
        """Makes the file to copy into, of its final size, and room for it: what was not used for
        longest goes, unless somebody reads it. Waits a little for those who do."""
        deadline, sign = 0.0, 0
        while True:
            with file_lock(self.folder / "locks" / "room", PATIENCE_SECONDS):
                entries = self._entries(key)
                reason = self._made_room(key, size, entries)
            if reason is None:
                return
            if not entries or time.monotonic() < self._waits_again:
                raise _NoRoomError(reason)
            # Others that copy something now are done with it sooner or later.
            now = max((_modified(path) for _, _, path in entries if _is_part(path)), default=0)
            if now != sign or not deadline:
                sign, deadline = now, time.monotonic() + ROOM_SECONDS
            if time.monotonic() >= deadline:
                self._waits_again = time.monotonic() + _HURRY_SECONDS
                raise _NoRoomError(reason)
            time.sleep(_PAUSE_SECONDS)

    def _made_room(self, key: str, size: int, entries: Sequence[_Entry]) -> str | None:
        """Why there is none; None if the file is made."""
        used = sum(entry.size for entry in entries)
        candidates = iter(entries)
        while True:
            reason = f"cache_limit={self.limit}, and all copies in {self.folder} are in use"
            if self.limit is None or used + size <= self.limit:
                try:
                    _make_file(self._part(key), size)
                    return None
                except OSError as error:
                    reason = f"{self.folder}: {error.strerror}"
                    if error.errno not in _FULL:
                        return reason
            freed = next(filter(None, map(self._evict, candidates)), 0)
            if not freed:
                return reason
            used -= freed

    def _entries(self, own: str) -> list[_Entry]:
        """What takes room, the least recently used first; the part of `own` is made anew."""
        found = []
        for path in (self.folder / "data").iterdir():
            with contextlib.suppress(FileNotFoundError):
                about = path.stat()
                if path != self._part(own):
                    # What was left by a crash goes first.
                    used = 0 if _is_part(path) else about.st_atime_ns
                    found.append(_Entry(used, about.st_size, path))
        return sorted(found)

    def _evict(self, entry: _Entry) -> int:
        """The bytes that this frees: 0 if somebody holds it."""
        key = entry.path.name.lstrip(".").partition(".")[0]
        try:
            with file_lock(self.folder / "locks" / key, 0):
                entry.path.unlink(missing_ok=True)
                if not _is_part(entry.path):
                    self._record(key).unlink(missing_ok=True)
        except TimeoutError:
            return 0
        return entry.size

    def _lock(self, key: str, *, shared: bool) -> contextlib.AbstractContextManager[None]:
        return file_lock(
            self.folder / "locks" / key,
            PATIENCE_SECONDS,
            shared=shared,
            sign_of_life=lambda: _modified(self._part(key)),
        )

    def _data(self, key: str, file: ShardFile) -> Path:
        return self.folder / "data" / (key + suffix_of(file.name))

    def _part(self, key: str) -> Path:
        return self.folder / "data" / f".{key}.part"

    def _record(self, key: str) -> Path:
        return self.folder / "records" / f"{key}.json"

    def _warn(self, file: ShardFile, reason: str) -> None:
        warnings.warn(
            f"shard {file.name} is not cached: {reason}. It is read where it is, each time.",
            stacklevel=4,
        )


class _NoRoomError(FarandoleError):
    """There is none for a copy."""


def _is_part(path: Path) -> bool:
    return path.name.startswith(".")


def _make_file(path: Path, size: int) -> None:
    """With all of its room on the disk, so that a full one is known at once."""
    with path.open("wb") as file:
        try:
            if size:
                os.posix_fallocate(file.fileno(), 0, size)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):  # by some file systems
                raise
            file.truncate(size)


def _pieces(file: ShardFile) -> Iterator[bytes]:
    with file.opened() as source:
        while piece := source.read(_PIECE):
            yield piece


def _warn_of_damage(file: ShardFile, copy: Path, what: str) -> None:
    warnings.warn(
        f"the copy {copy} of shard {file.name} is damaged: its {what} is wrong. It is made again.",
        stacklevel=4,
    )


def suffix_of(name: str) -> str:
    """Of a path, or of a URL, which may have a query."""
    return PurePosixPath(name.partition("?")[0]).suffix


def _key(file: ShardFile) -> str:
    return hashlib.sha256(f"{file.name}\n{file.identity}".encode()).hexdigest()[:40]


def _modified(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0
