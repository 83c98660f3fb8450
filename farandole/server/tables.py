"""Tables, and where their rows live.

A table has rows of one width and dtype. Rows are cut into blocks, and blocks are dealt out to the
ranges like cards: block b goes to range (b + offset) mod R. So a range holds every R-th block, side
by side in one array, and a run of rows of the table is one run of rows in each range:

    rows    0 … 7   8 … 15   16 … 23   24 … 31        (block_rows = 8, R = 3)
    block     0        1        2         3
    range     0        1        2         0   ─▶  range 0 holds rows 0 … 7, 24 … 31 as its 0 … 15

A dense table has blocks so large that each range gets at most one: nothing need be cut. A table of
embeddings has small ones, so that neighbouring rows, which are often all in use or all not, are
spread over the servers.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from farandole.errors import UserError, nearest
from farandole.server.filters import parse_codec

DTYPES = ("float64", "float32", "float16", "bfloat16", "int64", "int32")
_DENSE_BLOCK_BYTES = 1 << 20  # smaller ones cost more in messages than a second server saves
_SPARSE_BLOCK_BYTES = 1 << 16


class Span(NamedTuple):
    """Rows `start` to `stop` of a table."""

    start: int
    stop: int


class RangeRows(NamedTuple):
    """A run of rows in one range, and the rows of the table that these are, in order."""

    range: int
    start: int
    stop: int
    spans: tuple[Span, ...]


@dataclass(frozen=True)
class Table:
    """What clients and servers must agree on. Made by `dense` or `sparse`."""

    name: str
    rows: int
    width: int
    dtype: str
    rule: str
    block_rows: int
    ranges: int
    rounds: bool = False
    """Pushes are gathered until all members have made theirs, and applied as one: their mean."""
    backups: int = 0  # members of whom a round does not wait
    codec: str = ""
    """Pushed values travel encoded by it; what is put or read does not."""

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise UserError(f"table {self.name!r}: {nearest(self.dtype, DTYPES)}")
        if min(self.rows, self.width, self.block_rows, self.ranges) < 1 or self.backups < 0:
            raise UserError(
                f"table {self.name!r}: {self.rows} rows × {self.width}, {self.backups} backups "
                f"in {self.ranges} ranges cannot be."
            )
        if self.codec:
            parse_codec(self.codec)
            if not self.torch_dtype.is_floating_point:
                raise UserError(
                    f"table {self.name!r}: the codec {self.codec!r} is for floating-point numbers, "
                    f"not for {self.dtype}."
                )

    @classmethod
    def dense(
        cls,
        name: str,
        rows: int,
        *,
        ranges: int,
        width: int = 1,
        dtype: str = "float32",
        rule: str = "add",
        rounds: bool = False,
        backups: int = 0,
        codec: str = "",
    ) -> Table:
        least = max(1, _DENSE_BLOCK_BYTES // _row_bytes(width, dtype))
        block = max(least, -(-rows // ranges))
        return cls(name, rows, width, dtype, rule, block, ranges, rounds, backups, codec)

    @classmethod
    def sparse(
        cls,
        name: str,
        rows: int,
        *,
        ranges: int,
        width: int = 1,
        dtype: str = "float32",
        rule: str = "add",
        codec: str = "",
    ) -> Table:
        block = max(1, _SPARSE_BLOCK_BYTES // _row_bytes(width, dtype))
        return cls(name, rows, width, dtype, rule, block, ranges, codec=codec)

    @property
    def id(self) -> int:
        """Stands for the name in messages."""
        return id_of(self.name)

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype = getattr(torch, self.dtype)
        assert isinstance(dtype, torch.dtype)
        return dtype

    @property
    def used_ranges(self) -> list[int]:
        """The ranges that hold any of its rows."""
        blocks = -(-self.rows // self.block_rows)
        return sorted(
            (block + self._offset) % self.ranges for block in range(min(blocks, self.ranges))
        )

    def rows_in(self, range_: int) -> int:
        """How many of its rows a range holds."""
        first = (range_ - self._offset) % self.ranges
        blocks = -(-self.rows // self.block_rows)
        if first >= blocks:
            return 0
        count = (blocks - 1 - first) // self.ranges + 1
        last = first + (count - 1) * self.ranges
        return (count - 1) * self.block_rows + min(
            self.block_rows, self.rows - last * self.block_rows
        )

    def pieces(self, start: int, stop: int) -> Iterator[RangeRows]:
        """Where the rows from `start` to `stop` live: at most one run in each range."""
        self._check(start, stop)
        if start == stop:
            return
        size = self.block_rows
        first, last = start // size, (stop - 1) // size
        # Every R-th block lies in the same range, and there side by side. So the first R blocks
        # stand for all ranges, and the blocks that follow each of them continue its run without a
        # gap.
        for block in range(first, min(last + 1, first + self.ranges)):
            blocks = range(block, last + 1, self.ranges)
            spans = tuple(Span(max(start, b * size), min(stop, (b + 1) * size)) for b in blocks)
            here = block // self.ranges * size + spans[0].start - block * size
            count = sum(span.stop - span.start for span in spans)
            yield RangeRows((block + self._offset) % self.ranges, here, here + count, spans)

    def scattered(self, rows: torch.Tensor) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        """Where these rows live: for each range its own numbers for them, and their positions.

        Numbers come sorted if `rows` are.
        """
        if not rows.numel():
            return
        self._check(int(rows.min()), int(rows.max()) + 1)
        block = rows // self.block_rows
        home = (block + self._offset) % self.ranges
        local = block // self.ranges * self.block_rows + rows % self.block_rows
        # Stable, so that sorted rows stay sorted within each range. Servers rely on that order.
        order = torch.argsort(home, stable=True)
        counts = torch.bincount(home, minlength=self.ranges).tolist()
        begin = 0
        for range_, count in enumerate(counts):
            if count:
                positions = order[begin : begin + count]
                yield range_, local[positions], positions
                begin += count

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Table:
        """Raises `UserError` when this is no table."""
        try:
            table = cls(**json.loads(text))
        except (AttributeError, TypeError, ValueError) as error:
            raise UserError(f"{text[:80]!r} describes no table: {error}.") from error
        for field in dataclasses.fields(cls):
            value = getattr(table, field.name)
            if type(value).__name__ != field.type:
                raise UserError(
                    f"{text[:80]!r} describes no table: {field.name}={value!r} is no {field.type}."
                )
        return table

    @property
    def _offset(self) -> int:
        return self.id % self.ranges  # else every table would begin in the same range

    def _check(self, start: int, stop: int) -> None:
        if not 0 <= start <= stop <= self.rows:
            raise UserError(
                f"table {self.name!r} has rows 0 to {self.rows - 1}; {start} to {stop - 1} are "
                "not all among them."
            )


@functools.lru_cache(maxsize=4096)
def id_of(name: str) -> int:
    """Block 0 of the table with this name is in range id mod ranges."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=7).digest(), "big")


def _row_bytes(width: int, dtype: str) -> int:
    if dtype not in DTYPES:
        raise UserError(f"{dtype!r} is no dtype of a table. {nearest(dtype, DTYPES)}")
    return max(1, width) * int(getattr(torch, dtype).itemsize)
