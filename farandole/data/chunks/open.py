"""`fd.data.shards` and `fd.data.array`: from names of files to a dataset."""

from __future__ import annotations

import glob
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from farandole.data.chunks.dataset import WINDOW, ChunkedDataset, Transform
from farandole.data.chunks.formats.arrays import (
    ArraySource,
    Hdf5File,
    NumpyFile,
    SafetensorsFile,
    ZarrArrays,
)
from farandole.data.chunks.formats.lines import Lines
from farandole.data.chunks.formats.tables import ArrowShard, ParquetShard
from farandole.data.chunks.formats.tar import TarShard
from farandole.data.chunks.read_ahead import AHEAD
from farandole.data.chunks.source import CHUNK_BYTES, ChunkSource
from farandole.errors import UserError

_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(\d+)\.\.(\d+)")
_READERS = 8  # files whose headers are read at once

_FORMATS: dict[str, Callable[[Path, int], ChunkSource]] = {
    ".tar": TarShard,
    ".parquet": lambda path, _: ParquetShard(path),
    ".arrow": lambda path, _: ArrowShard(path),
    ".feather": lambda path, _: ArrowShard(path),
    ".jsonl": lambda path, size: Lines(path, size, is_json=True),
    ".txt": lambda path, size: Lines(path, size, is_json=False),
    ".npy": lambda path, size: NumpyFile(path, None, size, as_dict=False, single=True),
    ".safetensors": lambda path, size: SafetensorsFile(path, None, size, as_dict=True),
}
_ARRAYS: dict[str, type[ArraySource]] = {
    ".h5": Hdf5File,
    ".hdf5": Hdf5File,
    ".zarr": ZarrArrays,
    ".npy": NumpyFile,
    ".safetensors": SafetensorsFile,
}


def shards(
    pattern: str | Path | Sequence[str | Path],
    *,
    transform: Transform | None = None,
    window: int = WINDOW,
    chunk_bytes: int = CHUNK_BYTES,
) -> ChunkedDataset:
    """The samples of all files that `pattern` names, for `run.loader`.

    A pattern has braces (`train-{000..127}.tar`, `{a,b}.parquet`), or `*` and `?`; a list of
    patterns is their files one after the other. By their suffix, files are WebDataset's tars,
    Parquet or Arrow tables, NumPy or safetensors arrays, JSONL, or lines of text.

    A process has `window` chunks at hand, and mixes their samples. A chunk has about `chunk_bytes`,
    or what the file itself keeps together, if that is more. Raises `UserError` for names of
    nothing, and `DataError` naming a file that cannot be read.
    """
    _check_size(chunk_bytes)
    paths = files_of(pattern)
    with ThreadPoolExecutor(_READERS, "farandole-shards") as executor:
        sources = list(executor.map(partial(_source, chunk_bytes=chunk_bytes), paths))
    _require_alike(sources)
    dataset = ChunkedDataset(sources, transform, window)
    if not len(dataset):
        raise UserError(f"{pattern}: none of the {len(paths)} shards holds a sample.")
    return dataset


def array(
    path: str | Path,
    *names: str,
    transform: Transform | None = None,
    window: int | None = None,
    chunk_bytes: int = CHUNK_BYTES,
    memory_bytes: int | None = None,
) -> ChunkedDataset:
    """The rows of an array, or of several side by side, in a file that need not fit in memory.

    An HDF5 (.h5, .hdf5) or safetensors file, a Zarr folder, or a .npy file, which is mapped. With
    several names a sample is a tuple. Without any, the file has to hold one array.

    A process that reads mixes the rows of `window` chunks (16 unless `memory_bytes` says how many),
    while a thread reads the next ones. All of these chunks together take at most `memory_bytes`.
    """
    source = array_source(path, names, chunk_bytes)
    if not names and len(source.described) > 1:
        raise UserError(
            f"{path} has several arrays: {', '.join(source.described)}. Name those that you want: "
            f"fd.data.array({str(path)!r}, {next(iter(source.described))!r}, …)."
        )
    if not sum(source.sizes):
        raise UserError(f"{path}: the array has no rows.")
    if memory_bytes is None:
        return ChunkedDataset([source], transform, WINDOW if window is None else window)
    return ChunkedDataset([source], transform, *_fitting(source, window, memory_bytes))


def array_source(
    path: str | Path, names: Sequence[str], chunk_bytes: int = CHUNK_BYTES
) -> ArraySource:
    """The arrays of a file; without names, all that it has. Raises `UserError`."""
    path = Path(path)
    kind = _ARRAYS.get(path.suffix)
    if kind is None:
        raise UserError(f"{path}: arrays are read from {', '.join(_ARRAYS)} files.")
    if not path.exists():
        raise UserError(f"{path}: there is no such file.")
    _check_size(chunk_bytes)
    return kind(path, names or None, chunk_bytes, as_dict=False, single=len(names) <= 1)


def _fitting(source: ArraySource, window: int | None, memory_bytes: int) -> tuple[int, int]:
    """How many chunks are mixed, and how many are read ahead, within so many bytes."""
    each = source.largest_chunk_bytes
    room = memory_bytes // each
    ahead = max(1, min(AHEAD, room // 4))
    least = 1 if window is None else window
    if room < least + ahead:
        raise UserError(
            f"{source.name}: chunks of {each} bytes, {least} mixed and {ahead} read ahead, take "
            f"more than memory_bytes={memory_bytes}. Give {(least + ahead) * each} or more, or "
            "smaller chunk_bytes; what the file itself keeps in one chunk is read at once."
        )
    return room - ahead if window is None else window, ahead


def files_of(pattern: str | Path | Sequence[str | Path]) -> list[Path]:
    """Those that a pattern names, in its order. Raises `UserError` where it names none."""
    return [path for each in _listed(pattern) for path in _files(str(each))]


def _listed(pattern: str | Path | Sequence[str | Path]) -> Sequence[str | Path]:
    return [pattern] if isinstance(pattern, (str, Path)) else pattern


def _files(pattern: str) -> list[Path]:
    found: list[Path] = []
    for name in _without_braces(pattern):
        if glob.has_magic(name):
            matches = sorted(glob.glob(name, recursive=True))  # noqa: PTH207  (of any root)
            if not matches:
                raise UserError(f"{name}: no file has such a name.")
            found += map(Path, matches)
        else:
            found.append(Path(name))
    return found


def _without_braces(pattern: str) -> Iterator[str]:
    """As a shell expands them."""
    braces = _BRACES.search(pattern)
    if braces is None:
        yield pattern
        return
    before, after = pattern[: braces.start()], pattern[braces.end() :]
    numbers = _RANGE.fullmatch(braces[1])
    if numbers is not None:
        first, last = numbers[1], numbers[2]
        if int(first) > int(last):
            raise UserError(f"{pattern}: {{{braces[1]}}} counts down.")
        inner: Sequence[str] = [
            str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)
        ]
    else:
        inner = braces[1].split(",")
    for each in inner:
        yield from _without_braces(before + each + after)


def _check_size(chunk_bytes: int) -> None:
    if chunk_bytes < 1:
        raise UserError(f"chunk_bytes={chunk_bytes}: at least 1 byte is read at a time.")


def _source(path: Path, chunk_bytes: int) -> ChunkSource:
    make = _FORMATS.get(path.suffix)
    if make is None and path.name.endswith((".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst")):
        make = TarShard  # which says what to do
    if make is None:
        raise UserError(f"{path}: shards are {', '.join(_FORMATS)} files.")
    return make(path, chunk_bytes)


def _require_alike(sources: Sequence[ChunkSource]) -> None:
    """Arrays of all files must have rows of one kind: another one in the middle of an epoch would
    be an error hours later."""
    arrays = [source for source in sources if isinstance(source, ArraySource)]
    for other in arrays[1:]:
        first = arrays[0]
        for name in {*first.described, *other.described}:
            here, there = _row_kind(first, name), _row_kind(other, name)
            if here != there:
                raise UserError(
                    f"{other.name}, {name!r}: its rows are {there}, and those of {first.name} are "
                    f"{here}. All shards must have the same."
                )


def _row_kind(source: ArraySource, name: str) -> Any:
    found = source.described.get(name)
    return "none" if found is None else f"{found.dtype} of shape {found.shape[1:]}"
