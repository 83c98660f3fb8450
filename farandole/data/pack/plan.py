"""Which files of a folder make which samples, and which samples make which shard.

    cats/01.jpg  cats/01.json       one sample: files of the same name up to the last dot
    dogs/07.jpg                     another; its class is 1, that of the second folder

Everything is decided before anything is written, from names and sizes alone: packing that was
interrupted goes on by the same plan.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from farandole.errors import UserError

_TAR_BLOCK = 512


class PackedFile(NamedTuple):
    """A file, as it is called in its shard."""

    path: Path
    name: str
    size: int
    modified_ns: int


class PackedSample(NamedTuple):
    key: str
    files: tuple[PackedFile, ...]
    label: int | None  # the number of its class, if the folder has classes

    @property
    def size(self) -> int:
        """In a tar file: a header and whole blocks for each."""
        sizes = [file.size for file in self.files] + ([1] if self.label is not None else [])
        return sum(_TAR_BLOCK + -(-size // _TAR_BLOCK) * _TAR_BLOCK for size in sizes)


@dataclass(frozen=True)
class PackPlan:
    folder: Path
    shards: Sequence[Sequence[PackedSample]]
    classes: Sequence[str]  # none: there are no folders of classes
    hidden: int  # files that were left out, since their names begin with a dot; folders too

    @property
    def samples(self) -> int:
        return sum(map(len, self.shards))

    def shard_name(self, number: int) -> str:
        return f"{number:0{self._width}d}.tar"

    @property
    def _width(self) -> int:
        return max(3, len(str(len(self.shards) - 1)))

    def pattern(self, target: Path) -> str:
        """As `fd.data.shards` takes it."""
        first, last = (self.shard_name(n)[:-4] for n in (0, len(self.shards) - 1))
        name = f"{first}.tar" if first == last else f"{{{first}..{last}}}.tar"
        return str(target / name)

    def fingerprint(self) -> str:
        """Of all that it says: of another folder, of changed files, or of other sizes another."""
        hashed = hashlib.sha256()
        for shard in self.shards:
            listed = [
                [sample.key, sample.label, [[*file[1:]] for file in sample.files]]
                for sample in shard
            ]
            hashed.update(json.dumps(listed).encode())
        return hashed.hexdigest()


def make_plan(
    folder: Path, *, shard_bytes: int, shard_samples: int | None, seed: int | None
) -> PackPlan:
    """`shard_samples` None: as many as `shard_bytes` hold. `seed` None: in the order of names.

    Raises `UserError` for a folder without files, and for two files that would be one.
    """
    if not folder.is_dir():
        raise UserError(f"{folder} is no folder. Give the folder whose files are to be packed.")
    if shard_samples is not None and shard_samples < 1:
        raise UserError(f"--samples {shard_samples}: a shard holds at least one.")
    hidden, samples = _samples(folder)
    if not samples:
        raise UserError(f"{folder} has no files to pack.")
    tops = sorted({sample.key.split("/")[0] for sample in samples if "/" in sample.key})
    in_classes = all("/" in sample.key for sample in samples)
    if in_classes:
        numbers = {name: number for number, name in enumerate(tops)}
        samples = [
            sample._replace(label=None if _has_label(sample) else numbers[sample.key.split("/")[0]])
            for sample in samples
        ]
    if seed is not None:
        random.Random(seed).shuffle(samples)
    shards = _cut(samples, shard_bytes, shard_samples)
    return PackPlan(folder, shards, tops if in_classes else [], hidden)


def _samples(folder: Path) -> tuple[int, list[PackedSample]]:
    """All of them, sorted; and how many files were left out."""
    found: dict[str, list[PackedFile]] = {}
    seen: dict[str, Path] = {}
    hidden = 0
    for path in _files(folder):
        if path.name.startswith("."):
            hidden += 1
            continue
        relative = path.relative_to(folder)
        base, dot, suffix = path.name.rpartition(".")
        stem, field = (base, suffix.lower()) if dot else (path.name, "bin")
        # A dot within a name would begin the field, for readers of such shards.
        key = relative.with_name(stem.replace(".", "_")).as_posix()
        name = f"{key}.{field}"
        if name in seen:
            raise UserError(
                f"{seen[name]} and {path} would both be {name} of a shard. Rename one of them."
            )
        seen[name] = path
        status = path.stat()
        file = PackedFile(path, name, status.st_size, status.st_mtime_ns)
        found.setdefault(key, []).append(file)
    return hidden, [PackedSample(key, tuple(found[key]), None) for key in sorted(found)]


def _files(folder: Path) -> Iterator[Path]:
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            path = Path(place, name)
            if path.is_file():
                yield path


def _has_label(sample: PackedSample) -> bool:
    return any(file.name.endswith(".cls") for file in sample.files)


def _cut(
    samples: Sequence[PackedSample], shard_bytes: int, shard_samples: int | None
) -> list[list[PackedSample]]:
    shards: list[list[PackedSample]] = [[]]
    size = 0
    for sample in samples:
        full = (
            size + sample.size > shard_bytes
            if shard_samples is None
            else len(shards[-1]) >= shard_samples
        )
        if shards[-1] and full:
            shards.append([])
            size = 0
        shards[-1].append(sample)
        size += sample.size
    return shards
