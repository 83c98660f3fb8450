"""A shard that is read from a copy in a cache, or where it is if the cache has no room."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from farandole.data.chunks.files.cache import ShardCache
from farandole.data.chunks.files.shard_file import ShardFile
from farandole.data.chunks.source import ChunkSource
from farandole.errors import DataError, UserError


@dataclass(frozen=True)
class CachedFile(ShardFile):
    """The copy is of the file with which the job began. So reads from it need not ask whether the
    file has changed since: copying does."""

    original: ShardFile
    cache: ShardCache

    @property
    def size(self) -> int:  # type: ignore[override]
        return self.original.size

    @property
    def name(self) -> str:
        return self.original.name

    @property
    def identity(self) -> str:
        return self.original.identity

    def check(self) -> None:
        """There is nothing to ask for: see above."""

    @contextmanager
    def opened(self) -> Iterator[BinaryIO]:
        with self.at_path() as copy:
            if copy is None:
                with self.original.opened() as file:
                    yield file
                self.original.check()
                return
            with copy.open("rb") as file:
                yield file

    def at_path(self) -> Any:
        return self.cache.held(self.original)

    def read(self, start: int, stop: int) -> bytes:
        with self.at_path() as copy:
            if copy is None:
                return self.original.read(start, stop)
            with copy.open("rb") as file:
                file.seek(start)
                return self.whole(file.read(stop - start), start, stop)


class ArraysByPath(ChunkSource):
    """Arrays in a file that is not on a disk of its own: their libraries read a path."""

    def __init__(self, file: ShardFile, make: Callable[[Path], Any]) -> None:
        self.name = file.name
        self._file = file
        with self._at_path() as path:
            self._arrays = make(path)
        self.sizes = self._arrays.sizes

    @property
    def kinds(self) -> Mapping[str, str]:
        found: Mapping[str, str] = self._arrays.kinds
        return found

    def read(self, chunk: int) -> Sequence[Any]:
        with self._at_path():
            rows: Sequence[Any] = self._arrays.read(chunk)
        return rows

    @contextmanager
    def _at_path(self) -> Iterator[Path]:
        with self._file.at_path() as path:
            if path is not None:
                yield path
                return
        if not isinstance(self._file, CachedFile):
            raise UserError(
                f"{self.name}: arrays are read from a path. Say where to keep a copy: "
                "fd.data.shards(…, cache='/local/disk')."
            )
        raise DataError(f"shard {self.name}: arrays are read from a copy, and there is none.")
