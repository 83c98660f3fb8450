"""What formats need of a file: its bytes, by ranges, and that it stays the same.

A file knows its name and what it looked like when the job began. It is opened where it is read, in
a process of its own perhaps, and closed again: so it can be sent to a process, and outlives a fork.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import BinaryIO

from farandole.errors import DataError


class ShardError(DataError):
    """The file itself cannot be read. It is no bad sample, which a user may want to skip."""


Part = Callable[[int, int], bytes]
"""Gives the bytes from one place of the file to another, both within a part of it."""


class ShardFile(ABC):
    """A file of the job's data. Everything raises `DataError` naming it if it cannot be read."""

    size: int

    @property
    @abstractmethod
    def name(self) -> str:
        """As the user gave it: a path or a URL."""

    @property
    @abstractmethod
    def identity(self) -> str:
        """Another one for a file that was written again."""

    @abstractmethod
    def check(self) -> None:
        """Raises `DataError` if it is another file than when the job began."""

    @abstractmethod
    def opened(self) -> AbstractContextManager[BinaryIO]:
        """Its bytes, which can be read from any place on."""

    @abstractmethod
    def at_path(self) -> AbstractContextManager[Path | None]:
        """Where it is on a disk, as long as the context lasts; None if it is not."""

    @abstractmethod
    def read(self, start: int, stop: int) -> bytes:
        """These bytes, of the file that it was when the job began."""

    def part(self, start: int, stop: int) -> Part:
        """These bytes, which will be asked for in small pieces."""
        data = self.read(start, stop)
        return lambda begin, end: data[begin - start : end - start]

    def whole(self, data: bytes, start: int, stop: int) -> bytes:
        """The bytes that were read, if they are as many as there should be."""
        if len(data) != stop - start:
            raise ShardError(
                f"shard {self.name} is cut short: {stop - start} bytes from {start} on were "
                f"expected, and there are {len(data)}."
            )
        return data

    def has_changed(self, size: int) -> ShardError:
        """It was written again, and now has `size` bytes."""
        return ShardError(
            f"shard {self.name} has changed since the job began: it had {self.size} bytes, and now "
            f"has {size}, or was written again. Samples would be missed or read twice: start the "
            "job again, on files that stay as they are."
        )
