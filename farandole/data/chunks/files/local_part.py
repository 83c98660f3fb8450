"""A part of a file on a disk, which the system reads ahead into its own memory.

Reading all of a chunk and cutting samples out of it copies every byte twice, and takes new memory
for each chunk. Here the system is told which part will be needed. It reads that in the background,
in one piece, and each sample is copied once, when it is taken.
"""

from __future__ import annotations

import os
import weakref
from typing import Final

from farandole.data.chunks.files.shard_file import ShardError, ShardFile

_HIGHEST_DESCRIPTOR: Final = 256
"""A new file gets the lowest free number. A high one says that many are open, and a process may
open 1024 in most places: then chunks are read whole instead."""


class LocalPart:
    """Gives bytes of a file that stays open as long as this object is used."""

    def __init__(self, file: ShardFile, descriptor: int) -> None:
        self._file = file
        self._descriptor = descriptor
        self._before = _stamp(descriptor)
        weakref.finalize(self, os.close, descriptor)

    @classmethod
    def of(cls, file: ShardFile, path: str, start: int, stop: int) -> LocalPart | None:
        """None if the system cannot do that, or has too many files open. Raises `ShardError`."""
        if not hasattr(os, "posix_fadvise"):
            return None
        try:
            descriptor = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise ShardError(f"shard {file.name} cannot be read: {error}.") from error
        if descriptor > _HIGHEST_DESCRIPTOR:
            os.close(descriptor)
            return None
        part = cls(file, descriptor)
        file.check()  # after it was opened: from here on, any change shows in its stamp
        os.posix_fadvise(descriptor, start, stop - start, os.POSIX_FADV_WILLNEED)
        return part

    def __call__(self, start: int, stop: int) -> bytes:
        data = b""
        try:
            while len(data) < stop - start:  # one call gives at most 2 GiB
                more = os.pread(self._descriptor, stop - start - len(data), start + len(data))
                if not more:
                    break
                data = data + more if data else more
            now = _stamp(self._descriptor)
        except OSError as error:
            raise ShardError(f"shard {self._file.name} cannot be read: {error}.") from error
        if now != self._before:  # asked after the bytes were read: they are of the same file
            raise self._file.has_changed(now[0])
        return self._file.whole(data, start, stop)


def _stamp(descriptor: int) -> tuple[int, int]:
    found = os.fstat(descriptor)
    return found.st_size, found.st_mtime_ns
