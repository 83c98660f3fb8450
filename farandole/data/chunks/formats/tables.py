"""Parquet and Arrow files: a row is a sample, as a dictionary of its columns.

A chunk is what the file itself is cut into: a row group, or a record batch. pyarrow reads them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from farandole.data.chunks.files.shard_file import ShardFile
from farandole.data.chunks.source import ChunkSource
from farandole.errors import DataError, UserError


def require_pyarrow() -> None:
    try:
        import pyarrow  # noqa: F401
    except ImportError:
        raise UserError(
            "Parquet and Arrow files need pyarrow, which is not installed: pip install "
            "'farandole[data]'."
        ) from None


class _Table(ChunkSource):
    """A file whose rows all have the same columns."""

    def __init__(self, file: ShardFile) -> None:
        require_pyarrow()
        self.name = file.name
        self._file = file
        self._kinds: Mapping[str, str] = {}

    @property
    def kinds(self) -> Mapping[str, str]:
        return self._kinds


class ParquetShard(_Table):
    def __init__(self, file: ShardFile) -> None:
        super().__init__(file)
        with _opened(file) as opened, _parquet(opened) as parquet:
            about = parquet.metadata
            self._kinds = _kinds(parquet.schema_arrow)
            self.sizes = [about.row_group(group).num_rows for group in range(about.num_row_groups)]

    def read(self, chunk: int) -> Sequence[Any]:
        self._file.check()
        with _opened(self._file) as opened, _parquet(opened) as parquet:
            rows = _Rows(parquet.read_row_group(chunk))
        self._file.check()  # and nobody has written it again meanwhile
        return rows


class ArrowShard(_Table):
    """Of the file format, which Feather is too."""

    def __init__(self, file: ShardFile) -> None:
        super().__init__(file)
        import pyarrow as pa

        with _opened(file, mapped=True) as opened:
            batches = pa.ipc.open_file(opened)
            self._kinds = _kinds(batches.schema)
            self.sizes = [
                batches.get_batch(at).num_rows for at in range(batches.num_record_batches)
            ]

    def read(self, chunk: int) -> Sequence[Any]:
        import pyarrow as pa

        self._file.check()
        with _opened(self._file) as opened:
            rows = _Rows(pa.ipc.open_file(opened).get_batch(chunk))
        self._file.check()
        return rows


def _parquet(opened: Any) -> Any:
    import pyarrow.parquet as pq

    return pq.ParquetFile(opened)


class _Rows(Sequence[Any]):
    """Numbers as NumPy has them, everything else as Python has it."""

    def __init__(self, table: Any) -> None:
        self._columns = {
            name: column.to_numpy(zero_copy_only=False)
            if _is_plain(column.type) and not column.null_count
            else column.to_pylist()
            for name, column in zip(table.column_names, _columns(table), strict=True)
        }
        self._count: int = table.num_rows

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, row: Any) -> Any:
        return {name: column[row] for name, column in self._columns.items()}


def _columns(table: Any) -> list[Any]:
    found = []
    for column in table.columns:
        found.append(column.combine_chunks() if hasattr(column, "combine_chunks") else column)
    return found


def _kinds(schema: Any) -> dict[str, str]:
    """Types of numbers. Of all else, which becomes Python's own, only that it is there."""
    return {
        field.name: str(field.type) if _is_plain(field.type) else "no numbers" for field in schema
    }


def _is_plain(kind: Any) -> bool:
    import pyarrow as pa

    return bool(
        pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)
    )


@contextmanager
def _opened(file: ShardFile, *, mapped: bool = False) -> Iterator[Any]:
    """As pyarrow reads it: itself, where there is a path. What it finds wrong has the name."""
    import pyarrow as pa

    try:
        with file.at_path() as path:
            if path is not None:
                with pa.memory_map(str(path)) if mapped else pa.OSFile(str(path)) as opened:
                    yield opened
            else:
                with file.opened() as opened:
                    yield pa.PythonFile(opened, "r")
    except (OSError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        raise DataError(f"shard {file.name} cannot be read: {error}") from error
