"""Parquet and Arrow files: a row is a sample, as a dictionary of its columns.

A chunk is what the file itself is cut into: a row group, or a record batch. pyarrow reads them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from farandole.data.chunks.source import ChunkSource, FileStamp
from farandole.errors import DataError, UserError


def require_pyarrow() -> None:
    try:
        import pyarrow  # noqa: F401
    except ImportError:
        raise UserError(
            "Parquet and Arrow files need pyarrow, which is not installed: pip install "
            "'farandole[data]'."
        ) from None


class ParquetShard(ChunkSource):
    def __init__(self, path: Path) -> None:
        require_pyarrow()
        import pyarrow.parquet as pq

        self.name = str(path)
        self._stamp = FileStamp.of(path)
        with _named(path):
            about = pq.read_metadata(path)
        self.sizes = [about.row_group(group).num_rows for group in range(about.num_row_groups)]

    def read(self, chunk: int) -> Sequence[Any]:
        import pyarrow.parquet as pq

        self._stamp.check()
        with _named(self._stamp.path), pq.ParquetFile(self._stamp.path) as file:
            return _Rows(file.read_row_group(chunk))


class ArrowShard(ChunkSource):
    """Of the file format, which Feather is too."""

    def __init__(self, path: Path) -> None:
        require_pyarrow()
        import pyarrow as pa

        self.name = str(path)
        self._stamp = FileStamp.of(path)
        with _named(path), pa.memory_map(str(path)) as mapped:
            file = pa.ipc.open_file(mapped)
            self.sizes = [file.get_batch(at).num_rows for at in range(file.num_record_batches)]

    def read(self, chunk: int) -> Sequence[Any]:
        import pyarrow as pa

        self._stamp.check()
        with _named(self._stamp.path), pa.OSFile(str(self._stamp.path)) as opened:
            return _Rows(pa.ipc.open_file(opened).get_batch(chunk))


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


def _is_plain(kind: Any) -> bool:
    import pyarrow as pa

    return bool(
        pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)
    )


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """What pyarrow finds wrong, with the name of the file."""
    try:
        yield
    except (OSError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        raise DataError(f"shard {path} cannot be read: {error}") from error
