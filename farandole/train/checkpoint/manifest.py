"""The manifest of a checkpoint: written privately, and trusted in nothing when it is read.

Its checksum tells damage, not intent: whoever can write the folder can seal another text. So every
name must be a plain one inside the folder, every file a regular one of the size that is said, and
sizes and depths have limits. What is wrong is a `ValueError` with the reason, or an `OSError`.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from io import BufferedReader
from pathlib import Path
from typing import Any, Final, NoReturn

from farandole.errors import CheckpointError

NAME: Final = "manifest.json"
FORMAT: Final = 1
LARGEST_BYTES: Final = 256 << 20
"""Of a manifest. Tensors have files of their own, so megabytes are many already."""

_PART: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]*(\.[0-9]+)?")  # no path, nothing hidden
_LONGEST_NAME: Final = 100
_SHA256: Final = re.compile(r"[0-9a-f]{64}")

Entry = dict[str, Any]
"""What one writer adds to the manifest: its files with their checksums, its trees, and the names
of tensors that are not finite."""


@dataclass(frozen=True)
class StoredFile:
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    files: Mapping[str, StoredFile]  # by the name of the part
    trees: Mapping[str, Any]
    not_finite: Sequence[str] = ()  # tensors with NaN or infinity in a model or an optimizer
    metrics: Mapping[str, float] = field(default_factory=dict)
    """What the script has logged since the checkpoint before it, on rank 0."""


def file_of(part: str) -> str:
    return f"{part}.safetensors"


def manifest_text(entries: Sequence[Entry], metrics: Mapping[str, float]) -> bytes:
    """The whole manifest of what several ranks have written. Metrics are finite numbers."""
    files = {name: item for entry in entries for name, item in entry["files"].items()}
    trees = {name: item for entry in entries for name, item in entry["trees"].items()}
    not_finite = [name for entry in entries for name in entry["not_finite"]]
    content = {"format": FORMAT, "files": files, "trees": trees}
    if not_finite:
        content["not_finite"] = not_finite
    if metrics:
        content["metrics"] = dict(metrics)
    text = _sealed(json.dumps(content))
    if len(text) > LARGEST_BYTES:
        raise CheckpointError(
            f"what is no tensor takes {len(text) >> 20} MiB, and {LARGEST_BYTES >> 20} MiB is the "
            "limit. Save long lists of numbers as tensors."
        )
    return text


def write_manifest(folder: Path, entries: Sequence[Entry], metrics: Mapping[str, float]) -> Path:
    """Only its owner can read it, as safetensors has it for tensors."""
    text = manifest_text(entries, metrics)
    path = folder / NAME
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "wb") as file:
        file.write(text)
    return path


def read_manifest(folder: Path) -> Manifest:
    """Raises `ValueError` with what is wrong, or `OSError`."""
    with open_regular(folder / NAME) as (file, size):
        if size > LARGEST_BYTES:
            raise ValueError(f"{NAME} has {size} bytes, more than a manifest can have")
        text = file.read(LARGEST_BYTES + 1)
    return parse_manifest(text)


def parse_manifest(text: bytes) -> Manifest:
    """Raises `ValueError` with what is wrong."""
    try:
        content = json.loads(_unsealed(text), parse_constant=_no_number)
    except RecursionError:
        raise ValueError(f"{NAME} is nested too deeply") from None
    return _checked(content)


@contextmanager
def open_regular(path: Path) -> Iterator[tuple[BufferedReader, int]]:
    """The file and its size. A link, a folder, a pipe or a device in its place is refused."""
    if path.is_symlink():
        raise ValueError(f"{path.name} is a symbolic link")
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    with os.fdopen(os.open(path, flags | getattr(os, "O_BINARY", 0)), "rb") as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise ValueError(f"{path.name} is no regular file")
        yield file, found.st_size


def _sealed(body: str) -> bytes:
    seal = hashlib.sha256(body.encode()).hexdigest()
    return json.dumps({"sha256": seal, "body": body}).encode()


def _unsealed(text: bytes) -> str:
    try:
        wrapper = json.loads(text, parse_constant=_no_number)
    except RecursionError:
        raise ValueError(f"{NAME} is nested too deeply") from None
    body = wrapper.get("body") if isinstance(wrapper, dict) else None
    if not isinstance(body, str):
        raise ValueError(f"{NAME} is no manifest")
    if hashlib.sha256(body.encode(errors="surrogatepass")).hexdigest() != wrapper.get("sha256"):
        raise ValueError(f"{NAME} does not match its own checksum")
    return body


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number in a manifest")


def _checked(content: Any) -> Manifest:
    if not isinstance(content, dict):
        raise ValueError(f"{NAME} is no manifest")
    if content.get("format") != FORMAT:
        found = str(content.get("format"))[:20]
        raise ValueError(f"format {found} is not the known format {FORMAT}")
    files, trees = content.get("files"), content.get("trees")
    not_finite = content.get("not_finite", [])
    if not isinstance(files, dict) or not isinstance(trees, dict):
        raise ValueError(f"{NAME} has no files or no trees")
    if not isinstance(not_finite, list) or not all(isinstance(name, str) for name in not_finite):
        raise ValueError(f"{NAME}: not_finite is no list of names")
    metrics = content.get("metrics", {})
    if not isinstance(metrics, dict) or not all(map(_is_number, metrics.values())):
        raise ValueError(f"{NAME}: metrics are no numbers")
    for name in trees:
        if not _PART.fullmatch(name) or len(name) > _LONGEST_NAME:
            raise ValueError(f"{name[:_LONGEST_NAME]!r} is no name of a part")
    parts = {file_of(name): name for name in trees}
    stored = {}
    for name, item in files.items():
        if name not in parts:
            raise ValueError(f"{name[:_LONGEST_NAME]!r} is the file of no part")
        stored[parts[name]] = _stored(name, item)
    return Manifest(stored, trees, not_finite, metrics)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


def _stored(name: str, item: Any) -> StoredFile:
    size = item.get("bytes") if isinstance(item, dict) else None
    seal = item.get("sha256") if isinstance(item, dict) else None
    if type(size) is not int or size < 0:
        raise ValueError(f"the size of {name} is no number of bytes")
    if not isinstance(seal, str) or not _SHA256.fullmatch(seal):
        raise ValueError(f"the checksum of {name} is none")
    return StoredFile(size, seal)
