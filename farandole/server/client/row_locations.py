"""Where the rows of one call are: in each range, and in the values that go there or come back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from farandole.errors import UserError
from farandole.server.filters.residual import Which
from farandole.server.tables import RangeRows, Span, Table


def locate_rows(
    table: Table, start: int, stop: int, rows: torch.Tensor | None
) -> Iterator[tuple[int, LocalRows, Callable[[torch.Tensor], Any]]]:
    """For each range: which of its rows, and where these are in the flat values of a call."""
    width = table.width
    if rows is None:
        for piece in table.pieces(start, stop):
            here = LocalRows(piece.start, piece.stop, spans=piece.spans)
            yield piece.range, here, _spans_of(piece, start, width)
    else:
        for number, local, positions in table.scattered(rows):
            here = LocalRows(rows=local, positions=positions)
            yield number, here, _positions_of(positions, width)


class LocalRows:
    """Rows as a range counts them."""

    def __init__(
        self,
        start: int = 0,
        stop: int = 0,
        rows: torch.Tensor | None = None,
        *,
        spans: tuple[Span, ...] = (),
        positions: torch.Tensor | None = None,
    ) -> None:
        self.start, self.stop, self.rows = start, stop, rows
        self._spans, self._positions = spans, positions

    def in_table(self, listed: torch.Tensor | None) -> Which:
        """The same as the table counts them; `listed` are all rows of the call, if it lists any."""
        if listed is not None:
            return listed[self._positions]
        if len(self._spans) == 1:
            return slice(*self._spans[0])
        return torch.cat([torch.arange(*span) for span in self._spans])

    @property
    def count(self) -> int:
        return self.stop - self.start if self.rows is None else self.rows.numel()

    def as_fields(self) -> dict[str, Any]:
        return {"start": self.start, "stop": self.stop, "rows": self.rows}


def _spans_of(piece: RangeRows, start: int, width: int) -> Callable[[torch.Tensor], Any]:
    """One run of values if the rows of the piece are one, else a list of runs."""
    bounds = [((span.start - start) * width, (span.stop - start) * width) for span in piece.spans]

    def of(flat: torch.Tensor) -> Any:
        runs = [flat[begin:end] for begin, end in bounds]
        return runs[0] if len(runs) == 1 else runs

    return of


def _positions_of(positions: torch.Tensor, width: int) -> Callable[[torch.Tensor], Any]:
    return lambda flat: (flat.view(-1, width), positions)


def collect(where: Any, width: int) -> torch.Tensor:
    """The values at a place, flat and contiguous."""
    if isinstance(where, torch.Tensor):
        return where
    if isinstance(where, tuple):
        matrix, positions = where
        chosen: torch.Tensor = matrix[positions]
        return chosen.reshape(-1)
    return torch.cat(where)


def fill(where: Any, values: torch.Tensor, width: int) -> None:
    if isinstance(where, torch.Tensor):
        if where.data_ptr() != values.data_ptr():
            where.copy_(values)
    elif isinstance(where, tuple):
        matrix, positions = where
        matrix[positions] = values.view(-1, width)
    else:
        for run, part in zip(where, values.split([run.numel() for run in where]), strict=True):
            run.copy_(part)


def row_numbers(rows: torch.Tensor) -> torch.Tensor:
    if rows.is_floating_point():
        raise UserError(f"rows are counted in whole numbers, not in {rows.dtype}.")
    return rows.detach().to("cpu", torch.int64).reshape(-1)


def combined(
    rows: torch.Tensor, matrix: torch.Tensor, *, summing: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sorted, each row once."""
    rows = row_numbers(rows)
    if rows.numel() < 2 or bool((rows[1:] > rows[:-1]).all()):
        return rows, matrix
    unique, inverse = torch.unique(rows, return_inverse=True)
    if summing:
        total = torch.zeros(unique.numel(), matrix.shape[1], dtype=matrix.dtype)
        return unique, total.index_add_(0, inverse, matrix)
    if unique.numel() < rows.numel():
        raise UserError("put names a row twice; which of the two values is to stay?")
    order = torch.argsort(rows)
    return rows[order], matrix[order]
