"""`fd.data.shards` and `fd.data.array`: from names of files to a dataset."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from farandole.data.bad_samples import OnError
from farandole.data.chunks.dataset import WINDOW, ChunkedDataset, Transform
from farandole.data.chunks.files.cache import ShardCache, suffix_of
from farandole.data.chunks.files.cached import ArraysByPath, CachedFile
from farandole.data.chunks.files.remote import RemoteFile
from farandole.data.chunks.files.shard_file import ShardFile
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
from farandole.data.chunks.names import expanded
from farandole.data.chunks.read_ahead import AHEAD
from farandole.data.chunks.source import CHUNK_BYTES, ChunkSource, FileStamp
from farandole.errors import UserError
from farandole.urls import is_url

_READERS = 8  # files whose headers are read at once


def _arrays(
    kind: type[ArraySource], file: ShardFile, chunk_bytes: int, *, as_dict: bool
) -> ChunkSource:
    def make(path: Path) -> ArraySource:
        return kind(path, None, chunk_bytes, as_dict=as_dict, single=not as_dict)

    return make(file.path) if isinstance(file, FileStamp) else ArraysByPath(file, make)


_FORMATS: dict[str, Callable[[ShardFile, int], ChunkSource]] = {
    ".tar": TarShard,
    ".parquet": lambda file, _: ParquetShard(file),
    ".arrow": lambda file, _: ArrowShard(file),
    ".feather": lambda file, _: ArrowShard(file),
    ".jsonl": lambda file, size: Lines(file, size, is_json=True),
    ".txt": lambda file, size: Lines(file, size, is_json=False),
    ".npy": lambda file, size: _arrays(NumpyFile, file, size, as_dict=False),
    ".safetensors": lambda file, size: _arrays(SafetensorsFile, file, size, as_dict=True),
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
    cache: str | Path | None = None,
    cache_limit: int | None = None,
    on_error: OnError = "raise",
) -> ChunkedDataset:
    """The samples of all files that `pattern` names, for `run.loader`.

    A pattern has braces (`train-{000..127}.tar`, `{a,b}.parquet`), or `*` and `?`; a list of
    patterns is their files one after the other. By their suffix, files are WebDataset's tars,
    Parquet or Arrow tables, NumPy or safetensors arrays, JSONL, or lines of text. Names may be URLs
    of anything that fsspec opens.

    `cache` is a folder on a local disk, in which shards are kept when they are first used: at most
    `cache_limit` bytes of them, those that were used last. Ranks and jobs share it.

    A sample that cannot be decoded, or that `transform` fails on, is an error that names it. With
    `on_error="skip"`, loaders leave it out and count it. A shard that cannot be read always is one.

    A process has `window` chunks at hand, and mixes their samples. A chunk has about `chunk_bytes`,
    or what the file itself keeps together, if that is more. Raises `UserError` for names of
    nothing, and `DataError` naming a file that cannot be read.
    """
    _check_size(chunk_bytes)
    kept = _cache(cache, cache_limit)
    names = [name for each in _listed(pattern) for name in expanded(str(each))]
    with ThreadPoolExecutor(_READERS, "farandole-shards") as executor:
        make = partial(_source, chunk_bytes=chunk_bytes, cache=kept)
        sources = list(executor.map(make, names))
    _require_alike(sources)
    dataset = ChunkedDataset(sources, transform, window, on_error=on_error)
    if not len(dataset):
        raise UserError(f"{pattern}: none of the {len(names)} shards holds a sample.")
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
    return [Path(name) for each in _listed(pattern) for name in expanded(str(each))]


def _listed(pattern: str | Path | Sequence[str | Path]) -> Sequence[str | Path]:
    return [pattern] if isinstance(pattern, (str, Path)) else pattern


def _check_size(chunk_bytes: int) -> None:
    if chunk_bytes < 1:
        raise UserError(f"chunk_bytes={chunk_bytes}: at least 1 byte is read at a time.")


def _cache(folder: str | Path | None, limit: int | None) -> ShardCache | None:
    if folder is None:
        if limit is not None:
            raise UserError(f"cache_limit={limit} needs cache=, the folder of the cache.")
        return None
    if is_url(str(folder)):
        raise UserError(f"cache={str(folder)!r}: a cache is a folder on a local disk.")
    return ShardCache(Path(folder), limit)


def _source(name: str, chunk_bytes: int, cache: ShardCache | None) -> ChunkSource:
    make = _FORMATS.get(suffix_of(name))
    if make is None and name.endswith((".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst")):
        raise UserError(
            f"{name} is compressed, and cannot be read from the middle. Unpack it to a .tar "
            "first; what is inside may well be compressed."
        )
    if make is None:
        raise UserError(f"{name}: shards are {', '.join(_FORMATS)} files.")
    file: ShardFile = RemoteFile.of(name) if is_url(name) else FileStamp.of(Path(name))
    return make(file if cache is None else CachedFile(file, cache), chunk_bytes)


def _require_alike(sources: Sequence[ChunkSource]) -> None:
    """Values must be of one kind in all files: another one in the middle of an epoch would be an
    error hours later, or none at all where a library converts it."""
    told = [source for source in sources if source.kinds and sum(source.sizes)]
    for other in told[1:]:
        first = told[0]
        for name in sorted({*first.kinds, *other.kinds}):
            here, there = first.kinds.get(name, "missing"), other.kinds.get(name, "missing")
            is_optional = "missing" in (here, there) and not other.has_fixed_fields
            if here != there and not is_optional:
                raise UserError(
                    f"{other.name}, {name!r} is {there}, and in {first.name} it is {here}. All "
                    "shards must have the same."
                )
