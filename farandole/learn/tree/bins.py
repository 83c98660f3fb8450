"""Columns in bins, between which a tree may split.

A column with no more distinct values than bins has one bin for each, and its splits are those of an
exact search. Others have bins of about equal weight, from a sketch of their quantiles.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from farandole.learn.linear.moments import Array
from farandole.learn.statistics.sketch import Summary


@dataclass(frozen=True)
class Bins:
    """Of each column the values that bins stand for, and the cuts between them."""

    values: list[Array]
    cuts: list[Array]

    @property
    def most(self) -> int:
        return max(len(each) for each in self.values)

    def of(self, column: int, X: Array) -> npt.NDArray[np.int64]:
        """The bin of each row: up to the first cut, up to the second, …"""
        return np.searchsorted(self.cuts[column], X, side="left")

    def threshold(self, column: int, left: int, right: int) -> float:
        """Between two bins. Those between them have no rows."""
        values = self.values[column]
        return float(_between(values[left], values[right]))


def as_bins(summaries: list[Summary], most: int) -> Bins:
    values = [each.shrunk(most).values for each in summaries]
    return Bins(values, [_between(each[:-1], each[1:]) for each in values])


def _between(low: Array, high: Array) -> Array:
    """Halves first: their sum cannot overflow. Of neighbouring floats the lower one, because rows
    up to the cut go left."""
    middle = low / 2 + high / 2
    found: Array = np.where((middle >= high) | (middle < low), low, middle)
    return found
