"""The network that a cut is planned for: what it takes to hand a value on and to average weights.

A network may have levels: a host of some ranks with a fast network within, and a slower one between
hosts. Ranks are numbered host by host, so a stage that has ranks 2 to 5 lies on two hosts of four.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from farandole.errors import UserError


class Seconds(NamedTuple):
    """What a transfer takes."""

    fixed: float
    per_byte: float

    def of(self, size_bytes: float) -> float:
        return self.fixed + self.per_byte * size_bytes


class Component(NamedTuple):
    """A group of ranks, such as a host, with a network of its own."""

    ranks: int
    network: Network


@dataclass(frozen=True)
class Network:
    """What each rank, or each component, can send and receive; `within`: what is inside of them."""

    bytes_per_second: float
    seconds_per_message: float = 0.0
    within: Component | None = None

    def __post_init__(self) -> None:
        if not self.bytes_per_second > 0 or not 0 <= self.seconds_per_message < math.inf:
            raise UserError(
                f"Network: {self.bytes_per_second:g} bytes/s and {self.seconds_per_message:g} s a "
                f"message; the first must be above 0, the second at least 0."
            )
        if self.within is not None and self.within.ranks < 1:
            raise UserError(f"Network: a component of {self.within.ranks} ranks; give at least 1.")

    def handing(self, first: int, stop: int) -> Seconds:
        """A value there and its gradient back, between any two of the ranks `first` to `stop`."""
        if self.within is not None:
            parts = list(self._parts(first, stop, self.within.ranks))
            if len(parts) == 1:
                return self.within.network.handing(*parts[0])
        return Seconds(2 * self.seconds_per_message, 2 / self.bytes_per_second)

    def averaging(self, first: int, stop: int) -> Seconds:
        """An all-reduce over the ranks `first` to `stop`, level by level: within, then between."""
        inside = [Seconds(0.0, 0.0)]
        members = stop - first
        if self.within is not None:
            parts = list(self._parts(first, stop, self.within.ranks))
            inside = [self.within.network.averaging(*part) for part in parts]
            members = len(parts)
        # A ring: a reduce-scatter and an all-gather with members − 1 rounds each, 1/members of the
        # bytes in each round.
        rounds = 2 * (members - 1)
        return Seconds(
            max(each.fixed for each in inside) + rounds * self.seconds_per_message,
            max(each.per_byte for each in inside) + rounds / members / self.bytes_per_second,
        )

    @staticmethod
    def _parts(first: int, stop: int, size: int) -> Iterator[tuple[int, int]]:
        """The ranks `first` to `stop` of each component that has some, numbered from its first."""
        for component in range(first // size, (stop - 1) // size + 1):
            base = component * size
            yield max(first, base) - base, min(stop, base + size) - base
