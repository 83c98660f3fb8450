"""Filters decide, on the client, which rows of a push are sent.

A `Filter` is a frozen dataclass with a text form, as a codec is. `build` makes a `Sieve` of it,
which works on the pushes of one client to one table. Some drop what they do not send; those that
hold it back, to send it later, extend `ResidualSieve`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from farandole.errors import UserError
from farandole.options import format_options
from farandole.server.filters.savings import Savings, push_bytes

Rows = torch.Tensor
"""Numbers of rows: int64, sorted, each once."""


@dataclass(frozen=True)
class Filter(ABC):
    """Which rows are sent. Subclasses have a `name`."""

    name: ClassVar[str]
    needs_weight: ClassVar[bool] = False
    """Whether its sieve must be given the values that the client saw last."""

    @abstractmethod
    def build(self, rows: int, width: int, dtype: torch.dtype, stream: str = "") -> Sieve:
        """Puts the filter to work on a table of `rows` × `width`.

        What is random is drawn otherwise in each `stream`: name the worker and the table in it.
        """

    def __str__(self) -> str:
        """The text form: `kkt:l1=0.01/margin=0.2`.

        Options are parted by `/`, because a strategy's own, around them, are parted by `,`.
        """
        options = format_options(self).replace(",", "/")
        return f"{self.name}:{options}" if options else self.name


class Sieve(ABC):
    """A filter at work."""

    def __init__(self, filter_: Filter, rows: int, width: int, dtype: torch.dtype) -> None:
        self.savings = Savings()
        self._filter = filter_
        self._rows = rows
        self._width = width
        self._dtype = dtype

    def sift(
        self,
        rows: torch.Tensor | None,
        values: torch.Tensor,
        weight: torch.Tensor | None = None,
    ) -> tuple[Rows, torch.Tensor]:
        """The rows to send now, and their values, of a push of `rows` (None: all of the table).

        `values` has a line for each of `rows`, and so has `weight`: what the client saw there last.
        Rows may come in any order, and more than once; they then count together. Nothing that is
        given is changed. Raises `UserError` for rows that the table does not have.
        """
        self._check(rows, values, weight)
        if rows is None:
            rows = torch.arange(self._rows)
        else:
            rows, values, weight = in_order(rows, values, weight)
        if len(rows) and not 0 <= int(rows[0]) <= int(rows[-1]) < self._rows:
            raise UserError(
                f"the table has rows 0 to {self._rows - 1}; {int(rows[0])} to {int(rows[-1])} are "
                "not all among them."
            )
        self.savings.rows_offered += len(rows)
        self.savings.bytes_offered += self._bytes(rows)
        return self._sent(*self._choose(rows, values, weight))

    def flush(self) -> tuple[Rows, torch.Tensor]:
        """All that was held back until now, to send."""
        return self._sent(*self._take())

    def state_dict(self) -> dict[str, Any]:
        """What must be saved to go on as if never stopped: tensors and numbers."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from there."""
        assert not state, f"{self._filter} keeps nothing, and was given {sorted(state)}"

    @abstractmethod
    def _choose(
        self, rows: Rows, values: torch.Tensor, weight: torch.Tensor | None
    ) -> tuple[Rows, torch.Tensor]: ...

    def _take(self) -> tuple[Rows, torch.Tensor]:
        """What was held back; of a sieve that drops things, nothing."""
        return torch.empty(0, dtype=torch.int64), torch.empty(0, self._width, dtype=self._dtype)

    def _sent(self, rows: Rows, values: torch.Tensor) -> tuple[Rows, torch.Tensor]:
        self.savings.rows_sent += len(rows)
        self.savings.bytes_sent += self._bytes(rows)
        return rows, values

    def _bytes(self, rows: Rows) -> int:
        return push_bytes(len(rows), self._rows, self._width, self._dtype)

    def _check(
        self, rows: torch.Tensor | None, values: torch.Tensor, weight: torch.Tensor | None
    ) -> None:
        shape = (self._rows if rows is None else len(rows), self._width)
        if tuple(values.shape) != shape or values.dtype != self._dtype:
            raise UserError(
                f"a push of {shape[0]} rows must be {shape} of {self._dtype}; it is "
                f"{tuple(values.shape)} of {values.dtype}."
            )
        if self._filter.needs_weight and (weight is None or weight.shape != values.shape):
            got = None if weight is None else tuple(weight.shape)
            raise UserError(
                f"the filter {self._filter.name!r} compares a push with the values that were seen "
                f"last, {shape}; given was {got}. Get the rows before you push them."
            )


def require_float(filter_: Filter, dtype: torch.dtype) -> None:
    if not dtype.is_floating_point:
        raise UserError(
            f"the filter {filter_.name!r} takes floating-point tables; this one is {dtype}. Use "
            "none here."
        )


def require_at_least(filter_: Filter, option: str, least: float) -> None:
    value = getattr(filter_, option)
    if not least <= value < math.inf:  # nor NaN
        raise UserError(
            f"{filter_.name}: {option}={value:g} must be a number of at least {least:g}."
        )


def require_share(filter_: Filter, option: str) -> None:
    value = getattr(filter_, option)
    if not 0 <= value < 1:
        raise UserError(f"{filter_.name}: {option}={value:g} must be 0 or more, and below 1.")


def largest_of_rows(values: torch.Tensor) -> torch.Tensor:
    """The size of each row's largest number; NaN where there is one."""
    return values.abs().amax(dim=1)


def in_order(
    rows: torch.Tensor, values: torch.Tensor, weight: torch.Tensor | None = None
) -> tuple[Rows, torch.Tensor, torch.Tensor | None]:
    """Sorted, and lines of the same row added up."""
    if bool((rows[1:] > rows[:-1]).all()):
        return rows, values, weight
    once, place = torch.unique(rows, return_inverse=True)
    merged = values.new_zeros(len(once), values.shape[1]).index_add_(0, place, values)
    if weight is not None:
        seen = weight.new_empty(len(once), weight.shape[1])
        seen[place] = weight  # of the same row it is the same
        weight = seen
    return once, merged, weight
