"""Tables that are files: any process of the host can open them, and none of them copies them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse

from farandole.learn.sources.source import Source, Table


@dataclass(frozen=True)
class ArrayFile:
    """A NumPy array in a file, which is mapped by whoever reads it. Travels as its name."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int = 0
    order: str = "C"

    @cached_property
    def _mapped(self) -> Any:
        if 0 in self.shape:  # such as the values of sparse rows that are all zero
            return np.empty(self.shape, self.dtype)
        order: Any = self.order
        return np.memmap(self.path, self.dtype, "r", self.offset, self.shape, order)

    def __getitem__(self, rows: slice) -> Any:
        return self._mapped[rows]

    def cut(self, rows: slice) -> Any:
        """Some of the rows, by the same name where that is possible; else in memory."""
        if self.order != "C":
            return np.array(self._mapped[rows])
        first, end, _ = rows.indices(self.shape[0])
        row_bytes = int(np.prod(self.shape[1:], dtype=np.int64)) * np.dtype(self.dtype).itemsize
        shape = (end - first, *self.shape[1:])
        return replace(self, shape=shape, offset=self.offset + first * row_bytes)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_mapped"}


@dataclass(frozen=True)
class SparseFile:
    """Sparse rows, as the three arrays of SciPy's CSR format."""

    data: ArrayFile
    indices: ArrayFile
    starts: ArrayFile
    shape: tuple[int, int]

    def __getitem__(self, rows: slice) -> Any:
        first, end, _ = rows.indices(self.shape[0])
        starts = np.asarray(self.starts[slice(first, end + 1)])
        within = slice(int(starts[0]), int(starts[-1]))
        parts = (self.data[within], self.indices[within], starts - starts[0])
        return scipy.sparse.csr_array(parts, shape=(end - first, self.shape[1]))


def in_files(source: Source, folder: Path) -> Source:
    """The same source, with all of its tables in files. New ones are written to `folder`."""
    names = ("X", "y", "weights")
    tables = (source.X, source.y, source.weights)
    return source.with_tables(
        [
            None if table is None else _in_file(table, folder / name)
            for name, table in zip(names, tables, strict=True)
        ]
    )


def by_name(source: Source) -> Source:
    """The same source. Its tables that are files travel as their names, the others as they are."""
    tables = (source.X, source.y, source.weights)
    return source.with_tables([None if table is None else _named(table) for table in tables])


def _named(table: Table) -> Table:
    if isinstance(table, np.memmap) and _is_whole_file(table):
        order = "C" if table.flags.c_contiguous else "F"
        where = Path(str(table.filename))
        return ArrayFile(where, table.dtype.str, table.shape, table.offset, order)
    return table


def _in_file(table: Table, path: Path) -> Table:
    table = _named(table)
    if isinstance(table, ArrayFile | SparseFile):
        return table
    if scipy.sparse.issparse(table):
        rows = scipy.sparse.csr_array(table)
        parts = (rows.data, rows.indices, rows.indptr)
        written = [_write(part, path.with_suffix(f".{at}")) for at, part in enumerate(parts)]
        return SparseFile(written[0], written[1], written[2], rows.shape)
    if isinstance(table, np.ndarray):
        return _write(table, path)
    return table  # such as an HDF5 dataset, by whatever it pickles to


def _is_whole_file(table: np.memmap[Any, Any]) -> bool:
    """Not a part of another one: a slice keeps the offset of its whole."""
    contiguous = table.flags.c_contiguous or table.flags.f_contiguous
    return contiguous and table.filename is not None and not isinstance(table.base, np.ndarray)


def _write(array: np.ndarray[Any, Any], path: Path) -> ArrayFile:
    if array.dtype.hasobject:
        array = array.astype("U")
    array = np.ascontiguousarray(array)
    array.tofile(path)
    return ArrayFile(path, array.dtype.str, array.shape)
