"""WebDataset's shards: tar files, in which files of the same name up to the first dot are a sample.

    000017.jpg  000017.cls  000017.json      ──▶  {"__key__": "000017", "jpg": b"…", "cls": 3, …}

Headers are read once, to find out where samples are; then runs of whole samples are read ahead.
Numbers, texts, JSON and arrays are decoded; everything else stays bytes, for the transform. Nothing
is unpickled.
"""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from farandole.data.chunks.files.shard_file import Part, ShardFile
from farandole.data.chunks.formats.tar_headers import TarMember, members
from farandole.data.chunks.source import ChunkSource, runs
from farandole.errors import DataError


class Member(NamedTuple):
    """A file of a sample, and where its bytes are."""

    field: str
    start: int
    stop: int


class TarSample(NamedTuple):
    key: str
    members: tuple[Member, ...]


_TOGETHER_BYTES = 2**14
"""Small files of a sample are read together: a read takes longer than to copy them once more."""


def _array(data: bytes) -> Any:
    return np.load(io.BytesIO(data), allow_pickle=False)


DECODERS: Mapping[str, Callable[[bytes], Any]] = {
    "cls": int,
    "index": int,
    "txt": bytes.decode,
    "text": bytes.decode,
    "json": json.loads,
    "npy": _array,
}


class TarShard(ChunkSource):
    """One of them, all of whose headers are read when it is made."""

    has_fixed_fields = False

    def __init__(self, file: ShardFile, chunk_bytes: int) -> None:
        self.name = file.name
        self._file = file
        self._samples = _index(file)
        self.sizes = runs([sample.members[-1].stop for sample in self._samples], chunk_bytes)
        self._begins = [0, *accumulate(self.sizes)]  # of each chunk, its first sample
        self._dtypes = _dtypes(file, self._samples)

    @property
    def kinds(self) -> Mapping[str, str]:
        return self._dtypes

    def read(self, chunk: int) -> Sequence[Any]:
        begin = self._begins[chunk]
        samples = self._samples[begin : begin + self.sizes[chunk]]
        start = min(member.start for member in samples[0].members)
        stop = max(member.stop for sample in samples for member in sample.members)
        return _Run(samples, self._file.part(start, stop), self._dtypes)


class _Run(Sequence[Any]):
    def __init__(self, samples: Sequence[TarSample], part: Part, dtypes: Mapping[str, str]) -> None:
        self._samples = samples
        self._part = part
        self._dtypes = dtypes

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, row: Any) -> Any:
        key, members = self._samples[row]
        sample: dict[str, Any] = {"__key__": key}
        part = self._part
        begin, end = members[0].start, members[-1].stop
        if len(members) > 1 and end - begin <= _TOGETHER_BYTES:
            part = _cut(part(begin, end), begin)
        for field, start, stop in members:
            data = part(start, stop)
            decode = DECODERS.get(field.rpartition(".")[2])
            try:
                sample[field] = data if decode is None else decode(data)
            except ValueError as error:
                raise DataError(f"{key}.{field} cannot be decoded: {error}") from error
            # A batch of several dtypes would be converted to the widest, and nobody would know.
            if field in self._dtypes and str(sample[field].dtype) != self._dtypes[field]:
                raise DataError(
                    f"{key}.{field} is {sample[field].dtype}, and that of the first sample of the "
                    f"shard is {self._dtypes[field]}"
                )
        return sample


def _cut(data: bytes, begin: int) -> Part:
    """Parts of what lies from `begin` on in the file."""
    return lambda start, stop: data[start - begin : stop - begin]


def _index(file: ShardFile) -> list[TarSample]:
    """Raises `DataError` for what is no tar file, or ends in the middle of one."""
    found: list[TarSample] = []
    try:
        with file.opened() as opened:
            for member in members(opened):
                _add(found, member, file.name)
    except DataError as error:
        raise (
            error if file.name in str(error) else DataError(f"shard {file.name}: {error}.")
        ) from None
    except (tarfile.TarError, OSError, EOFError) as error:
        raise DataError(f"shard {file.name} is no whole tar file: {error}.") from error
    keys = [sample.key for sample in found]
    if len(set(keys)) < len(keys):
        apart = next(key for key in keys if keys.count(key) > 1)
        raise DataError(
            f"shard {file.name}: the files of sample {apart!r} do not stand together, and would be "
            "taken for several samples. Pack it again, sorted by name."
        )
    end = max((member.stop for sample in found for member in sample.members), default=0)
    if end > file.size:
        raise DataError(
            f"shard {file.name} is cut short: its last file ends after the end of the shard."
        )
    return found


def _dtypes(file: ShardFile, samples: Sequence[TarSample]) -> dict[str, str]:
    """Of the arrays in the first sample, by their fields."""
    found: dict[str, str] = {}
    for field, start, stop in samples[0].members if samples else ():
        if DECODERS.get(field.rpartition(".")[2]) is _array:
            with suppress(ValueError):  # whoever takes the sample is told
                found[field] = str(_array(file.read(start, stop)).dtype)
    return found


def _add(found: list[TarSample], file: TarMember, shard: str) -> None:
    folder, slash, name = file.name.rpartition("/")
    base, dot, field = name.partition(".")
    if not dot or not base or name.startswith("."):
        return  # no sample of WebDataset's, such as a note of the one who packed it
    key = f"{folder}{slash}{base}"
    member = Member(field.lower(), file.start, file.stop)
    if found and found[-1].key == key:
        if any(other.field == member.field for other in found[-1].members):
            raise DataError(f"shard {shard} has {key}.{field} twice.")
        found[-1] = TarSample(key, (*found[-1].members, member))
    else:
        found.append(TarSample(key, (member,)))
