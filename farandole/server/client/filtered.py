"""Pushes to one table, less what can be left out.

What a script pushes goes through the filters in their order, then through the table's codec, and
what comes out is sent:

    push ──▶ filter ──▶ filter ──▶ codec ──▶ server
               │          │          │
               └──────────┴──────────┴── held back: goes with a later push, or with `flush`
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from farandole.errors import UserError
from farandole.server.client.calls import Pending
from farandole.server.client.store import Store
from farandole.server.filters import Savings, coded_bytes, parse_filter
from farandole.server.filters.filter import in_order
from farandole.server.filters.savings import ROW_NUMBER_BYTES, push_bytes


class Filtered:
    """Filters and codec at work on the pushes of one worker to one table of its store.

    `filters` are texts such as `kkt:l1=0.01` or `significant`; the codec is the table's own. `rank`
    tells workers apart: what is random is drawn otherwise on each.
    """

    def __init__(
        self, store: Store, name: str, filters: Sequence[str] = (), *, rank: int = 0
    ) -> None:
        self.savings = Savings()
        """Beside plain pushes. Row numbers count, also those that the servers know already."""
        self._store = store
        self._table = table = store.table(name)
        self._filters = [parse_filter(text) for text in filters]
        if filters and table.rounds:
            raise UserError(
                f"table {name!r} has rounds, which wait for a push to all of its rows; the filters "
                f"{', '.join(filters)} would leave some out. Use a codec there."
            )
        self._sieves = [
            filter_.build(table.rows, table.width, table.torch_dtype, f"{name} {rank} {place}")
            for place, filter_ in enumerate(self._filters)
        ]

    def push(
        self,
        rows: torch.Tensor | None,
        values: torch.Tensor,
        weight: torch.Tensor | None = None,
        *,
        rate: float = 1.0,
    ) -> None:
        """Gives values to the table's rule, for `rows` (None: all of the table).

        `weight` is what these rows were when this worker last saw them: some filters compare.
        What was held back before and goes now does so with this rate.
        """
        self.start_push(rows, values, weight, rate=rate).wait()

    def start_push(
        self,
        rows: torch.Tensor | None,
        values: torch.Tensor,
        weight: torch.Tensor | None = None,
        *,
        rate: float = 1.0,
        ticks: bool = False,
    ) -> Pending:
        """As `push`; returns at once. `ticks` is as in `Store.start_push`."""
        table = self._table
        count = table.rows if rows is None else rows.numel()
        values = self._matrix(values, count)
        seen = None if weight is None else self._matrix(weight, count)
        if rows is not None:
            rows = rows.detach().to("cpu", torch.int64).reshape(-1)
            rows, values, seen = in_order(rows, values, seen)
        self.savings.rows_offered += len(values)
        self.savings.bytes_offered += push_bytes(
            len(values), table.rows, table.width, table.torch_dtype
        )
        for sieve in self._sieves:
            left, values = sieve.sift(rows, values, seen)
            if seen is not None:
                # The next filter compares the same rows, so what was seen of them is cut down to
                # those that are left.
                seen = seen[left if rows is None else torch.searchsorted(rows, left)]
            rows = left
        return self._send(rows, values, rate=rate, ticks=ticks)

    def flush(self, *, rate: float = 1.0) -> None:
        """Sends all that was held back until now, by filters and codec, as it is."""
        held = [sieve.flush() for sieve in self._sieves]
        coding = self._store.coding(self._table.name)
        if coding is not None:
            held.append(coding.flush())
        if held:
            rows, values, _ = in_order(*(torch.cat(parts) for parts in zip(*held, strict=True)))
            self._send(rows, values, rate=rate, exact=True).wait()

    def state_dict(self) -> dict[str, Any]:
        """What is held back: all that must be saved to go on as if never stopped."""
        coding = self._store.coding(self._table.name)
        return {
            "filters": [str(filter_) for filter_ in self._filters],
            "sieves": [sieve.state_dict() for sieve in self._sieves],
            "coding": {} if coding is None else coding.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from there. Raises `UserError` if it was written under other filters."""
        filters = [str(filter_) for filter_ in self._filters]
        if state["filters"] != filters:
            raise UserError(
                f"table {self._table.name!r}: what was held back by {state['filters']} cannot be "
                f"taken over by {filters}. Use the same filters, or flush before you save."
            )
        for sieve, saved in zip(self._sieves, state["sieves"], strict=True):
            sieve.load_state_dict(saved)
        coding = self._store.coding(self._table.name)
        if coding is not None:
            coding.load_state_dict(state["coding"])

    def _send(
        self,
        rows: torch.Tensor | None,
        values: torch.Tensor,
        *,
        rate: float,
        ticks: bool = False,
        exact: bool = False,
    ) -> Pending:
        coding = None if exact else self._store.coding(self._table.name)
        before = 0 if coding is None else coding.savings.bytes_sent
        self.savings.rows_sent += len(values)
        if rows is not None and self._is_better_whole(len(rows), exact=exact):
            values, rows = self._spread(rows, values), None
        pending = self._store.start_push(
            self._table.name, values, rows=rows, rate=rate, ticks=ticks, exact=exact
        )
        sent = values.nbytes if coding is None else coding.savings.bytes_sent - before
        self.savings.bytes_sent += sent + (0 if rows is None else rows.numel() * ROW_NUMBER_BYTES)
        return pending

    def _is_better_whole(self, count: int, *, exact: bool) -> bool:
        """Whether the table without row numbers is fewer bytes than `count` rows with theirs.

        Rows that are left out are 0 then. Only `add` does nothing with these: under other rules a
        gradient of 0 moves a weight, by its momentum or its penalty.
        """
        if count == self._table.rows:
            return True
        if self._table.rule != "add":
            return False
        listed = self._value_bytes(count, exact) + count * ROW_NUMBER_BYTES
        return self._value_bytes(self._table.rows, exact) < listed

    def _value_bytes(self, rows: int, exact: bool) -> int:
        table, coding = self._table, self._store.coding(self._table.name)
        if coding is None or exact:
            return rows * table.width * table.torch_dtype.itemsize
        return coded_bytes(coding.codec, rows * table.width, table.torch_dtype)

    def _spread(self, rows: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        whole = torch.zeros(self._table.rows, self._table.width, dtype=values.dtype)
        whole[rows] = values
        return whole

    def _matrix(self, values: torch.Tensor, rows: int) -> torch.Tensor:
        table = self._table
        if values.numel() != rows * table.width:
            raise UserError(
                f"table {table.name!r}: {rows} rows × {table.width} are pushed, and "
                f"{tuple(values.shape)} was given for them."
            )
        return values.detach().to("cpu", table.torch_dtype).reshape(rows, table.width)
