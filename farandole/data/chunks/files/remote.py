"""A shard behind a URL: whatever fsspec opens.

Object stores say of every object how long it is, and give it a tag or a time that changes when it
is written again. That is asked for after every read: what was read is then of the same object as
when the job began.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

from farandole.data.chunks.files.shard_file import ShardFile
from farandole.errors import DataError, FarandoleError
from farandole.urls import open_url

_TAGS: Final = (
    "ETag", "etag", "generation", "md5Hash", "content_md5", "Content-MD5", "VersionId",
    "LastModified", "Last-Modified", "last_modified", "updated", "mtime",
)  # fmt: skip
"""By which the packages for different stores say that an object was written again."""


@dataclass(frozen=True)
class RemoteFile(ShardFile):
    url: str
    size: int
    tag: str

    @classmethod
    def of(cls, url: str) -> RemoteFile:
        with _named(url):
            files, path = open_url(url)
            files.invalidate_cache(path)  # of listings, which others make old
            about: Mapping[str, Any] = files.info(path)
        if about.get("size") is None:
            raise DataError(f"shard {url} cannot be read: its server does not say how long it is.")
        tag = ",".join(f"{name}={about[name]}" for name in _TAGS if about.get(name) is not None)
        return cls(url, int(about["size"]), tag)

    @property
    def name(self) -> str:
        return self.url

    @property
    def identity(self) -> str:
        return f"{self.size} {self.tag}"

    def check(self) -> None:
        now = RemoteFile.of(self.url)
        if now != self:
            raise self.has_changed(now.size)

    @contextmanager
    def opened(self) -> Iterator[BinaryIO]:
        with _named(self.url):
            files, path = open_url(self.url)
            with files.open(path, "rb") as file:
                yield file

    @contextmanager
    def at_path(self) -> Iterator[Path | None]:
        yield None

    def read(self, start: int, stop: int) -> bytes:
        with _named(self.url):
            files, path = open_url(self.url)
            data = bytes(files.cat_file(path, start, stop))
        self.check()
        return self.whole(data, start, stop)


@contextmanager
def _named(url: str) -> Iterator[None]:
    """What the store's package finds wrong, which may be of any class, with the name."""
    try:
        yield
    except FarandoleError:
        raise
    except FileNotFoundError as error:
        raise DataError(f"shard {url} cannot be read: there is no such file.") from error
    except Exception as error:
        raise DataError(f"shard {url} cannot be read: {type(error).__name__}: {error}.") from error
