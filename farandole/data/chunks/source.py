"""What data that are read in chunks have in common: files, how long their chunks are, reading one.

A source knows names and sizes only. Files are opened where they are read, in a process of its own
perhaps, and closed again: so a source can be sent to a process, and outlives a fork.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from farandole.errors import DataError

CHUNK_BYTES: Final = 8 << 20
"""What is read at once, unless the file keeps more together: enough that reading is sequential."""


class ChunkSource(ABC):
    """One file, or one array of several files."""

    name: str
    sizes: Sequence[int]  # samples in each chunk

    @abstractmethod
    def read(self, chunk: int) -> Sequence[Any]:
        """The samples of a chunk; decoded when they are taken out, or before.

        Raises `DataError`, or whatever the format's library does, for what cannot be read.
        """

    def expect(self, chunk: int) -> None:  # noqa: B027  (most have nothing to do)
        """It will be read soon: a source may tell the system, which reads it into its own memory
        meanwhile. Called by the thread that reads."""


@dataclass(frozen=True)
class FileStamp:
    """By which a file is known again: one that changes under a job is refused."""

    path: Path
    size: int
    modified_ns: int

    @classmethod
    def of(cls, path: Path) -> FileStamp:
        try:
            found = path.stat()
        except OSError as error:
            raise DataError(f"shard {path} cannot be read: {error.strerror}.") from error
        return cls(path, found.st_size, found.st_mtime_ns)

    def check(self) -> None:
        """Raises `DataError` if it is another file now."""
        now = FileStamp.of(self.path)
        if now != self:
            raise DataError(
                f"shard {self.path} has changed since the job began: it had {self.size} bytes, "
                f"and now has {now.size}, or was written again. Samples would be missed or read "
                "twice: start the job again, on files that stay as they are."
            )

    def read(self, start: int, stop: int) -> bytes:
        """These bytes. Raises `DataError`."""
        self.check()
        try:
            with self.path.open("rb") as file:
                file.seek(start)
                data = file.read(stop - start)
        except OSError as error:
            raise DataError(f"shard {self.path} cannot be read: {error}.") from error
        if len(data) != stop - start:
            raise DataError(
                f"shard {self.path} is cut short: {stop - start} bytes from {start} on were "
                f"expected, and there are {len(data)}."
            )
        return data


def runs(ends: Sequence[int], chunk_bytes: int) -> list[int]:
    """Cuts samples that end at these bytes into runs of about so many; how many are in each."""
    found: list[int] = []
    count, start = 0, 0
    for end in ends:
        count += 1
        if end - start >= chunk_bytes:
            found.append(count)
            count, start = 0, end
    return [*found, count] if count else found
