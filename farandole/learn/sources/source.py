"""Rows in chunks. Each chunk can be read by itself, in any process, any number of times.

    ┌────────┬─────┬─────────┐
    │ X      │ y   │ weights │  chunk 0
    │        │     │         │
    ├────────┼─────┼─────────┤
    │        │     │         │  chunk 1
    └────────┴─────┴─────────┘

The columns of data stand in `Table`s: whatever has rows that can be sliced. A *part* is a source of
its own, with the rows of some chunks only, for a worker that gets no others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import numpy as np
import scipy.sparse

from farandole.learn.sources.chunk import Chunk

CHUNK_BYTES = 8 << 20
BLOCK_BYTES = 2 << 20  # about the cache of a core


class Table(Protocol):
    """An array in memory, in a file, or sparse rows."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    def __getitem__(self, rows: slice) -> Any: ...


@dataclass(frozen=True)
class Source:
    """`name` is what errors call the data."""

    X: Table
    y: Table | None = None
    weights: Table | None = None
    chunk_rows: int = 0  # 0: about CHUNK_BYTES
    name: str = "X"
    first_chunk: int = 0  # of a part: which chunk of the whole its first rows are
    one_by_one: bool = False  # whether chunks are handed out to workers each by itself
    _finite: set[int] = field(
        default_factory=set, repr=False, compare=False
    )  # chunks, as looked at

    def __post_init__(self) -> None:
        if self.chunk_rows < 0:
            raise ValueError(f"chunk_rows={self.chunk_rows}: it is 1 or more, or 0 to choose it.")
        if self.chunk_rows == 0:
            # Not by the number of workers: the results shall not depend on that.
            row_bytes = 8 * int(np.prod(self.X.shape[1:], dtype=np.int64))
            object.__setattr__(self, "chunk_rows", max(1, CHUNK_BYTES // max(1, row_bytes)))

    @property
    def rows(self) -> int:
        return int(self.X.shape[0])

    @property
    def columns(self) -> int:
        return int(self.X.shape[1])

    @property
    def chunks(self) -> int:
        return -(-self.rows // self.chunk_rows)

    def read(self, number: int) -> Chunk:
        """Raises `ValueError` for NaN and infinity, which says where they are."""
        rows = self.rows_of(number, number + 1)
        return self._as_chunk(self._checked(number), rows, number, 0)

    def blocks(self, number: int) -> list[Callable[[], Chunk]]:
        """The rows of one chunk in turn, each as a chunk of its own, which becomes float64 when it
        is used: then it is in the cache. Raises what `read` does."""
        X, rows = self._checked(number), self.rows_of(number, number + 1)
        if scipy.sparse.issparse(X):
            return [partial(self._as_chunk, X, rows, number, 0)]
        size = max(1, BLOCK_BYTES // max(1, 8 * self.columns))
        return [
            partial(
                self._as_chunk,
                X[at : at + size],
                slice(rows.start + at, min(rows.start + at + size, rows.stop)),
                number,
                at,
            )
            for at in range(0, len(X), size)
        ]

    def _checked(self, number: int) -> Any:
        """The rows of X, all finite, in the type that they have. They are looked at once."""
        X = self.X[self.rows_of(number, number + 1)]
        if scipy.sparse.issparse(X):
            X = scipy.sparse.csr_array(X).astype(np.float64)
            X.sum_duplicates()  # an entry that is given in parts is one
        else:
            X = np.asarray(X)
            if X.dtype.itemsize > 8:  # what is finite there may not be in float64
                X = X.astype(np.float64)
        if number not in self._finite:
            self.require_finite(X, number * self.chunk_rows, number)
            self._finite.add(number)
        return X

    def _as_chunk(self, X: Any, rows: slice, number: int, at: int) -> Chunk:
        """`rows` of the tables, which begin with row `at` of the chunk."""
        y = None if self.y is None else np.asarray(self.y[rows])
        weights = None if self.weights is None else np.asarray(self.weights[rows], dtype=np.float64)
        return Chunk(X, y, weights, number * self.chunk_rows + at, number)

    def part(self, first: int, end: int) -> Source:
        """Chunks from `first` to before `end`, in memory unless they are in a file that has a name.
        They keep their numbers."""
        rows = self.rows_of(first, end)
        tables = [
            None if table is None else _cut(table, rows) for table in (self.X, self.y, self.weights)
        ]
        return replace(self.with_tables(tables), first_chunk=first)

    def rows_of(self, first: int, end: int) -> slice:
        """Those of chunks `first` to before `end`."""
        start = (first - self.first_chunk) * self.chunk_rows
        return slice(start, min(start + (end - first) * self.chunk_rows, self.rows))

    def with_tables(self, tables: Sequence[Table | None]) -> Source:
        """The same rows, stored elsewhere."""
        X, y, weights = tables
        assert X is not None
        return replace(self, X=X, y=y, weights=weights)

    def require_finite(self, X: Any, first: int, number: int) -> None:
        """Raises `ValueError` for chunk `number`, whose first row is `first`."""
        values = X.data if scipy.sparse.issparse(X) else X
        # One sum is a third of the cost of looking at every value.
        with np.errstate(over="ignore", invalid="ignore"):
            if np.isfinite(np.sum(values)) or np.isfinite(values).all():
                return
        dense = X.toarray() if scipy.sparse.issparse(X) else X
        row, *columns = (int(place[0]) for place in np.nonzero(~np.isfinite(dense)))
        value = dense[row, *columns]
        column = ", ".join(map(str, columns))
        kind = "NaN" if np.isnan(value) else "infinity"
        raise ValueError(
            f"Input {self.name} contains {kind}: row {first + row}, column {column} is {value} "
            f"(chunk {number}, its row {row}). Remove or impute such rows first."
        )


def _cut(table: Any, rows: slice) -> Any:
    if hasattr(table, "cut"):
        return table.cut(rows)
    part = table[rows]
    return part if scipy.sparse.issparse(part) else np.array(part)
