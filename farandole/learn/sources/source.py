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

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import scipy.sparse

from farandole.learn.sources.chunk import Chunk

CHUNK_BYTES = 8 << 20


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
        first = number * self.chunk_rows
        X = self.X[rows]
        if scipy.sparse.issparse(X):
            X = scipy.sparse.csr_array(X).astype(np.float64)
            X.sum_duplicates()  # an entry that is given in parts is one
        else:
            X = np.ascontiguousarray(X, dtype=np.float64)
        self.require_finite(X, first, number)
        y = None if self.y is None else np.asarray(self.y[rows])
        weights = None if self.weights is None else np.asarray(self.weights[rows], dtype=np.float64)
        return Chunk(X, y, weights, first, number)

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
