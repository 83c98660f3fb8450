"""The messages of a call: one for each range, their values in shared memory if there is any."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from farandole.errors import UserError
from farandole.server.client.pending import Answer
from farandole.server.client.row_locations import collect, combined, fill, locate_rows, row_numbers
from farandole.server.filters import Coding
from farandole.server.protocol.arena import Arena
from farandole.server.protocol.messages import Command, Kind, Read
from farandole.server.tables import Table

_ARENA_BYTES = 1 << 28  # address space; memory is taken when it is written to

Work = tuple[Sequence[Command | Read], Callable[[list[Answer]], Any], Sequence[torch.Tensor]]
"""What to ask, what to make of the answers, and the shared memory that is free after that."""


class Requests:
    """Holds the shared memory of a client, if it has any."""

    def __init__(self, *, shared_memory: bool) -> None:
        self.arena = _make_arena() if shared_memory else None

    def commands(
        self,
        kind: Kind,
        table: Table,
        values: torch.Tensor,
        start: int,
        rows: torch.Tensor | None,
        *,
        slot: int = 0,
        rate: float = 1.0,
        ticks: bool = False,
        clock: int = 0,
        coding: Coding | None = None,
    ) -> Work:
        """To put or push rows."""
        values = values.detach().to("cpu", table.torch_dtype).contiguous()
        if rows is None:
            count, extra = divmod(values.numel(), table.width)
        else:
            count, extra = rows.numel(), values.numel() - rows.numel() * table.width
        if extra:
            raise UserError(
                f"table {table.name!r} has rows of {table.width}; {values.numel()} values do not "
                f"make {'whole rows' if rows is None else f'{rows.numel()} of them'}."
            )
        matrix = values.view(count, table.width)
        if rows is not None and table.rounds and kind == Kind.PUSH:
            raise UserError(
                f"table {table.name!r} has rounds, in which every range waits for a push of "
                "everyone: push it whole, not by a list of rows."
            )
        if rows is not None:
            rows, matrix = combined(rows, matrix, summing=kind == Kind.PUSH)
        commands, areas = [], []
        flat = matrix.reshape(-1)
        for number, local, take_from in locate_rows(table, start, start + count, rows):
            part = collect(take_from(flat), table.width)
            if coding is not None:
                part = coding.encode(local.in_table(rows), part.view(-1, table.width))
            if self.arena is not None and not self._is_shared(part):
                area = self.arena.take(part.nbytes)
                if area is not None:
                    # Into shared memory: a server on this host reads the values there, and they
                    # need not be sent. The area stays taken until the answer, because the command
                    # may have to be sent again.
                    area.view(part.dtype).copy_(part)
                    areas.append(area)
                    part = area.view(part.dtype)
            commands.append(
                Command(
                    kind,
                    number,
                    table=table.id,
                    values=part,
                    slot=slot,
                    rate=rate,
                    clock=clock,
                    ticks=ticks,
                    **local.as_fields(),
                )
            )

        def finish(answers: list[Answer]) -> int:
            """Which round the table is in."""
            return max((answer.clock for answer in answers), default=0)

        return commands, finish, areas

    def reads(
        self,
        table: Table,
        start: int,
        stop: int | None,
        rows: torch.Tensor | None,
        needs: int,
        rounds: bool,
        slot: int,
        out: torch.Tensor | None,
    ) -> Work:
        """To get rows, into `out` or a tensor of their own."""
        stop = table.rows if stop is None else stop
        rows = None if rows is None else row_numbers(rows)
        places = list(locate_rows(table, start, stop, rows))  # first: they are checked there
        count = stop - start if rows is None else rows.numel()
        result = torch.empty(count, table.width, dtype=table.torch_dtype) if out is None else out
        if result.numel() != count * table.width or result.dtype != table.torch_dtype:
            raise UserError(
                f"get of {count} rows × {table.width} of {table.dtype} does not fit into "
                f"{tuple(result.shape)} of {result.dtype}."
            )
        flat = result.view(-1)
        reads, scatters, areas = [], [], []
        for number, local, put_in in places:
            area = None
            where = put_in(flat)
            if isinstance(where, torch.Tensor) and self._is_shared(where):
                area = where.view(torch.uint8)
            elif self.arena is not None:
                area = self.arena.take(local.count * table.width * flat.element_size())
                if area is not None:
                    areas.append(area)
            reads.append(
                Read(
                    number,
                    table=table.id,
                    slot=slot,
                    needs=needs,
                    rounds=rounds,
                    into=area,
                    **local.as_fields(),
                )
            )
            scatters.append((where, area))

        def finish(answers: list[Answer]) -> torch.Tensor:
            for answer, (where, area) in zip(answers, scatters, strict=True):
                values = answer.values
                if values is None and area is not None:
                    values = area.view(flat.dtype)
                assert values is not None
                fill(where, values, table.width)
                if answer.values is not None:
                    # One who was asked before may still write there: that memory is not used again.
                    areas[:] = [other for other in areas if other is not area]
            return result

        return reads, finish, areas

    def buffer(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """A flat tensor that need not be copied to be sent, or to be read into."""
        if self.arena is not None and count:
            area = self.arena.take(count * dtype.itemsize)
            if area is not None:
                return area.view(dtype).zero_()
        return torch.zeros(count, dtype=dtype)

    def give_back(self, areas: Iterable[torch.Tensor]) -> None:
        for area in areas:
            if self.arena is not None:
                self.arena.give_back(area)

    def close(self) -> None:
        if self.arena is not None:
            self.arena.close()
            self.arena = None

    def _is_shared(self, tensor: torch.Tensor) -> bool:
        return self.arena is not None and self.arena.locate(tensor) is not None


def _make_arena() -> Arena | None:
    try:
        return Arena.make(_ARENA_BYTES)
    except OSError:
        return None  # where there is no room for it, values travel as messages
