"""What data that are read in chunks have in common: files, how long their chunks are, reading one.

A source knows names and sizes only. Files are opened where they are read, in a process of its own
perhaps, and closed again: so a source can be sent to a process, and outlives a fork.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

from farandole.data.chunks.files.local_part import LocalPart
from farandole.data.chunks.files.shard_file import Part, ShardFile
from farandole.errors import DataError

CHUNK_BYTES: Final = 8 << 20
"""What is read at once, unless the file keeps more together: enough that reading is sequential."""


class ChunkSource(ABC):
    """One file, or one array of several files."""

    name: str
    sizes: Sequence[int]  # samples in each chunk
    has_fixed_fields = True  # every sample has all values that the first one has

    @property
    def kinds(self) -> Mapping[str, str]:
        """Of the values of a sample, by their names, what the file says of them: all shards must
        agree. Empty if it says nothing."""
        return {}

    @abstractmethod
    def read(self, chunk: int) -> Sequence[Any]:
        """The samples of a chunk; decoded when they are taken out, or before.

        Raises `DataError`, or whatever the format's library does, for what cannot be read.
        """

    def expect(self, chunk: int) -> None:  # noqa: B027  (most have nothing to do)
        """It will be read soon: a source may tell the system, which reads it into its own memory
        meanwhile. Called by the thread that reads."""


@dataclass(frozen=True)
class FileStamp(ShardFile):
    """A file on a disk, and by what it is known again: one that changes under a job is refused."""

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

    @property
    def name(self) -> str:
        return str(self.path)

    @property
    def identity(self) -> str:
        return f"{self.size} {self.modified_ns}"

    def check(self) -> None:
        now = FileStamp.of(self.path)
        if now != self:
            raise self.has_changed(now.size)

    @contextmanager
    def opened(self) -> Iterator[BinaryIO]:
        try:
            with self.path.open("rb") as file:
                yield file
        except OSError as error:
            raise DataError(f"shard {self.path} cannot be read: {error}.") from error

    @contextmanager
    def at_path(self) -> Iterator[Path | None]:
        yield self.path

    def part(self, start: int, stop: int) -> Part:
        return LocalPart.of(self, str(self.path), start, stop) or super().part(start, stop)

    def read(self, start: int, stop: int) -> bytes:
        self.check()
        with self.opened() as file:
            file.seek(start)
            data = file.read(stop - start)
        return self.whole(data, start, stop)


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
