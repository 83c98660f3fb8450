"""A folder of checkpoints in an object store: which there are, and how to write and read one.

    s3://bucket/digits/
      000004-node7-4242-1f3a9c02-9f86d081/    number, host, process, run, and a random word
        model-0.safetensors
        manifest.json                         written last, over the sizes and digests of all others
      000005-node7-4242-1f3a9c02-0c2b7e11/    no manifest: being written, or left by a crash

Object stores have no rename and no lock. So the name of a checkpoint under way is final and nobody
else's, and the manifest makes it a checkpoint: a single small object, which is there or not. The
name also says which run has made it, so that a second run in the same place is noticed.

What goes wrong here are errors of the store's package: `OSError`, or anything else.
"""

from __future__ import annotations

import os
import re
import secrets
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from farandole.train.checkpoint.manifest import LARGEST_BYTES, Manifest, parse_manifest
from farandole.train.checkpoint.manifest import NAME as MANIFEST
from farandole.urls import open_url

_NAME: Final = re.compile(r"(\d{6,})-(.+-\d+-[0-9a-f]{8})-[0-9a-f]{8}")
_WITHOUT_FOLDERS: Final = frozenset({"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "oss", "oci"})
"""Where making a folder would do nothing, or make a bucket that nobody has asked for."""


@dataclass(frozen=True, order=True)
class RemoteName:
    """Of a checkpoint, whole or under way."""

    number: int
    text: str
    run: str  # that has made it

    @classmethod
    def parse(cls, text: str) -> RemoteName | None:
        found = _NAME.fullmatch(text)
        return None if found is None else cls(int(found[1]), text, found[2])


class ObjectStore:
    """One folder, in the way that one run sees it."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._files, self._root = open_url(self.url)
        self._root = self._root.rstrip("/")
        host = re.sub(r"[^A-Za-z0-9.]+", "-", socket.gethostname())
        self.run = f"{host}-{os.getpid()}-{secrets.token_hex(4)}"

    def new_name(self, number: int) -> RemoteName:
        return RemoteName(number, f"{number:06d}-{self.run}-{secrets.token_hex(4)}", self.run)

    def url_of(self, name: str) -> str:
        return f"{self.url}/{name}" if name else self.url

    # What is there

    def names(self) -> list[RemoteName]:
        """Of everything that looks like a checkpoint, whole or not, oldest first."""
        # Listings may be cached, and others write here.
        self._files.invalidate_cache(self._root)
        try:
            found = self._files.ls(self._root, detail=False)
        except FileNotFoundError:
            return []
        parsed = (RemoteName.parse(path.rstrip("/").rpartition("/")[2]) for path in found)
        return sorted(name for name in parsed if name is not None)

    def is_whole(self, name: str) -> bool:
        return bool(self._files.exists(self._path(name, MANIFEST)))

    def whole_names(self) -> list[RemoteName]:
        """Of checkpoints with a manifest, oldest first."""
        return [name for name in self.names() if self.is_whole(name.text)]

    def sizes(self, name: str) -> dict[str, int]:
        """In bytes, of the files that are there."""
        self._files.invalidate_cache(self._path(name))
        try:
            found = self._files.ls(self._path(name), detail=True)
        except FileNotFoundError:
            return {}
        return {item["name"].rpartition("/")[2]: int(item["size"] or 0) for item in found}

    def manifest(self, name: str) -> Manifest:
        """Raises `ValueError` for what is none."""
        return parse_manifest(self.manifest_text(name))

    def manifest_text(self, name: str) -> bytes:
        path = self._path(name, MANIFEST)
        size = int(self._files.size(path) or 0)
        if size > LARGEST_BYTES:
            raise ValueError(f"{MANIFEST} has {size} bytes, more than a manifest can have")
        return bytes(self._files.cat_file(path))

    # Files of a checkpoint

    def write(self, name: str, file: str, pieces: Iterable[bytes | memoryview]) -> None:
        self._make_folder(name)
        with self._files.open(self._path(name, file), "wb") as stream:
            for piece in pieces:
                stream.write(piece)

    def write_small(self, name: str, file: str, content: bytes) -> None:
        """So that a reader sees all of it or nothing, also where the store is a plain disk."""
        self._make_folder(name)
        half = self._path(name, f"{file}.{secrets.token_hex(4)}.half")
        self._files.pipe_file(half, content)
        self._files.mv(half, self._path(name, file))

    def read_small(self, name: str, file: str) -> bytes | None:
        path = self._path(name, file)
        try:
            return bytes(self._files.cat_file(path))
        except FileNotFoundError:
            return None

    def fetch(self, name: str, file: str, to: str) -> None:
        self._files.get_file(self._path(name, file), to)

    def remove_file(self, name: str, file: str) -> None:
        self._files.rm_file(self._path(name, file))

    def remove(self, name: str) -> None:
        """The manifest first: what is left after a kill in the middle is no checkpoint."""
        if self.is_whole(name):
            self._files.rm_file(self._path(name, MANIFEST))
        self._files.rm(self._path(name), recursive=True)

    def _make_folder(self, name: str) -> None:
        kinds = self._files.protocol
        if _WITHOUT_FOLDERS.isdisjoint([kinds] if isinstance(kinds, str) else kinds):
            self._files.makedirs(self._path(name), exist_ok=True)

    def _path(self, *names: str) -> str:
        return "/".join((self._root, *names))


def require_files(sizes: Mapping[str, int], expected: Mapping[str, int]) -> None:
    """Raises `ValueError` if a file is missing or has another size than a manifest says."""
    for file, size in expected.items():
        if file not in sizes:
            raise ValueError(f"{file} is missing")
        if sizes[file] != size:
            raise ValueError(f"{file} has {sizes[file]} bytes instead of {size}")
