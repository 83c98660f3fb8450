"""Arrays, larger than memory perhaps: NumPy and safetensors files, HDF5, Zarr.

A sample is a row, that is, what the first axis counts. Several arrays of one file that are as long
as each other are read side by side: a sample is then a tuple, or a dictionary by their names.
"""

from __future__ import annotations

import math
import os
import threading
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from farandole.data.chunks.source import ChunkSource, FileStamp
from farandole.errors import DataError, UserError

_HEADERS = threading.Lock()
"""NumPy's parser of headers fails in several threads at once (Python before 3.11.8)."""


class Described(NamedTuple):
    """An array, as its file describes it."""

    shape: tuple[int, ...]
    dtype: str
    row_bytes: int
    stored_rows: int = 1  # that the file keeps, and so reads, together


class ArraySource(ChunkSource):
    """`names` None: all that the file has. With one name, `single` samples are its rows."""

    def __init__(
        self,
        path: Path,
        names: Sequence[str] | None,
        chunk_bytes: int,
        *,
        as_dict: bool,
        single: bool = False,
    ) -> None:
        self.name = str(path)
        self.path = path
        self._as_dict = as_dict
        self._single = single
        self._names: Sequence[str] | None = None  # those that are read, once they are chosen
        self._stamp = FileStamp.of(path) if path.is_file() else None  # Zarr's is a folder
        with self.named(), self.opened() as arrays:
            found = self._chosen(arrays, names)
            self.described = {name: self.describe(arrays[name]) for name in found}
        self._names = list(self.described)
        self.sizes = self._cut(chunk_bytes)

    @abstractmethod
    def opened(self) -> Any:
        """A context manager of a mapping from names to arrays that can be sliced."""

    def describe(self, array: Any) -> Described:
        shape = tuple(array.shape)
        chunks = getattr(array, "chunks", None)
        size = np.dtype(array.dtype).itemsize * math.prod(shape[1:])
        return Described(shape, str(array.dtype), size, chunks[0] if chunks else 1)

    def take(self, array: Any, begin: int, end: int) -> Any:
        return np.asarray(array[begin:end])

    @property
    def kinds(self) -> Mapping[str, str]:
        return {
            name: f"{each.dtype} of shape {each.shape[1:]}" for name, each in self.described.items()
        }

    @property
    def largest_chunk_bytes(self) -> int:
        """In memory, all arrays together."""
        return max(1, max(self.sizes) * sum(each.row_bytes for each in self.described.values()))

    def check_unchanged(self) -> None:
        """Raises `DataError` if the file was written since the job began."""
        if self._stamp is not None:
            self._stamp.check()

    def read(self, chunk: int) -> Sequence[Any]:
        self.check_unchanged()
        begin = sum(self.sizes[:chunk])
        with self.named(), self.opened() as arrays:
            taken = {
                name: self.take(arrays[name], begin, begin + self.sizes[chunk])
                for name in self.described
            }
        for name, rows in taken.items():
            if (
                len(rows) != self.sizes[chunk]
                or str(rows.dtype).removeprefix("torch.") != self.described[name].dtype
            ):
                raise DataError(f"{self.path}, {name!r}: it has changed since the job began.")
        return _RowsOfArrays(taken, as_dict=self._as_dict, single=self._single)

    def _chosen(self, arrays: Mapping[str, Any], names: Sequence[str] | None) -> list[str]:
        there = sorted(arrays)
        for name in names or ():
            if name not in there:
                raise UserError(f"{self.path} has no array {name!r}. It has {', '.join(there)}.")
        if not there:
            raise UserError(f"{self.path} has no arrays.")
        return list(names or there)

    def _cut(self, chunk_bytes: int) -> list[int]:
        lengths = {
            name: each.shape[0] if each.shape else None for name, each in self.described.items()
        }
        first = next(iter(lengths.values()))
        for name, length in lengths.items():
            if length is None:
                raise UserError(f"{self.path}, {name!r} is a single number, and has no rows.")
            if length != first:
                raise UserError(
                    f"{self.path}: the arrays are not as long as each other: {lengths}. Choose "
                    "those that belong together."
                )
        assert first is not None
        kinds = self.described.values()
        row_bytes = max(1, sum(each.row_bytes for each in kinds))
        # Whole chunks of the file, so that none of them is read or unpacked twice.
        stored = math.lcm(*(max(1, each.stored_rows) for each in kinds))
        stored = (
            stored
            if stored * row_bytes <= 8 * chunk_bytes
            else max(each.stored_rows for each in kinds)
        )
        rows = max(1, chunk_bytes // (row_bytes * stored)) * stored
        return [min(rows, first - begin) for begin in range(0, first, rows)]

    @contextmanager
    def named(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError, KeyError) as error:
            if isinstance(error, UserError):
                raise
            raise DataError(f"{self.path} cannot be read: {error}") from error


class _RowsOfArrays(Sequence[Any]):
    def __init__(self, arrays: Mapping[str, Any], *, as_dict: bool, single: bool) -> None:
        self._arrays = arrays
        self._as_dict = as_dict
        self._single = single

    def __len__(self) -> int:
        return len(next(iter(self._arrays.values())))

    def __getitem__(self, row: Any) -> Any:
        if self._as_dict:
            return {name: array[row] for name, array in self._arrays.items()}
        rows = tuple(array[row] for array in self._arrays.values())
        return rows[0] if self._single else rows


class NumpyFile(ArraySource):
    """A .npy file: one array, which is called `array`. Its header is read once."""

    _header: Mapping[str, Any] | None = None  # for `np.memmap`

    @contextmanager
    def opened(self) -> Iterator[Mapping[str, Any]]:
        if self._header is None:
            with _HEADERS:
                found = np.load(self.path, mmap_mode="r", allow_pickle=False)
            order = "C" if found.flags.c_contiguous else "F"
            self._header = {
                "dtype": found.dtype,
                "offset": found.offset,
                "shape": found.shape,
                "order": order,
            }
        if 0 in self._header["shape"]:
            yield {"array": np.empty(self._header["shape"], self._header["dtype"])}
        else:
            yield {"array": np.memmap(self.path, mode="r", **self._header)}

    def take(self, array: Any, begin: int, end: int) -> Any:
        return np.array(array[begin:end])  # a copy: the map is not kept


class SafetensorsFile(ArraySource):
    @contextmanager
    def opened(self) -> Iterator[Mapping[str, Any]]:
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(self.path, "pt") as file:
                names: list[str] = file.keys()
                yield {name: file.get_slice(name) for name in names}
        except SafetensorError as error:
            raise DataError(f"{self.path} cannot be read: {error}") from error

    def describe(self, array: Any) -> Described:
        shape = tuple(array.get_shape())
        one = array[:1]
        return Described(
            shape, str(one.dtype).removeprefix("torch."), one.element_size() * math.prod(shape[1:])
        )

    def take(self, array: Any, begin: int, end: int) -> Any:
        return array[begin:end]


class Hdf5File(ArraySource):
    """Opening a file takes HDF5 longer than reading a chunk: one that is read stays open."""

    _kept: tuple[int, Mapping[str, Any]] | None = None  # by the process of this number

    @contextmanager
    def opened(self) -> Iterator[Mapping[str, Any]]:
        h5py = imported("h5py", "HDF5")
        if self._names is not None:
            if self._kept is None or self._kept[0] != os.getpid():  # not one from before a fork
                file = h5py.File(self.path, "r")
                self._kept = os.getpid(), {name: file[name] for name in self._names}
            yield self._kept[1]
            return
        with h5py.File(self.path, "r") as file:
            found: dict[str, Any] = {}
            file.visititems(
                lambda name, item: (
                    found.update({name: item}) if isinstance(item, h5py.Dataset) else None
                )
            )
            yield found

    def expect(self, chunk: int) -> None:
        if self._kept is None or self._kept[0] != os.getpid() or not hasattr(os, "posix_fadvise"):
            return
        begin = sum(self.sizes[:chunk])
        for array in self._kept[1].values():
            with suppress(OSError, RuntimeError, TypeError, ValueError):  # some other kind of file
                descriptor = array.file.id.get_vfd_handle()
                for start, length in _stored_ranges(array, begin, begin + self.sizes[chunk]):
                    os.posix_fadvise(descriptor, start, length, os.POSIX_FADV_WILLNEED)

    def __getstate__(self) -> dict[str, Any]:
        """For a process that opens its own."""
        return {**self.__dict__, "_kept": None}


def _stored_ranges(array: Any, begin: int, end: int) -> Iterator[tuple[int, int]]:
    """Where the file has these rows of an HDF5 array, as far as that is easily told."""
    if array.chunks is None:
        start, row = array.id.get_offset(), array.nbytes // max(1, len(array))
        if start is not None:
            yield start + begin * row, (end - begin) * row
    elif array.chunks[1:] == array.shape[1:]:
        for first in range(begin, end, array.chunks[0]):
            stored = array.id.get_chunk_info_by_coord((first,) + (0,) * (array.ndim - 1))
            if stored.byte_offset is not None:
                yield stored.byte_offset, stored.size


class ZarrArrays(ArraySource):
    @contextmanager
    def opened(self) -> Iterator[Mapping[str, Any]]:
        zarr = imported("zarr", "Zarr")
        opened = zarr.open(str(self.path), mode="r")
        if isinstance(opened, zarr.Array):
            yield {"array": opened}
        else:
            yield {
                name: item
                for name, item in opened.members(max_depth=None)
                if isinstance(item, zarr.Array)
            }


def imported(package: str, what: str) -> Any:
    import importlib

    try:
        return importlib.import_module(package)
    except ImportError:
        raise UserError(
            f"{what} needs {package}, which is not installed: pip install 'farandole[data]'."
        ) from None
