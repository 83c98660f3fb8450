"""How far the members of a job have come, as one range has seen it.

A worker at clock c has ended c clocks: its updates stamped 0 … c − 1 are here. With a bound of s
a worker at clock c may read once the slowest has reached c − s: then every update stamped
c − s − 1 or earlier is in what it reads. That is the whole of bounded staleness.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

RESTING: Final = 1 << 62
"""The clock of a member that holds nobody up for now, such as between two passes over the data."""


class Clocks:
    """A vector clock over the members. Those who have left hold nobody up."""

    def __init__(self) -> None:
        self._members: dict[int, int] = {}
        self._strangers: dict[int, int] = {}  # whose membership has not been heard of yet

    @property
    def members(self) -> frozenset[int]:
        return frozenset(self._members)

    # Invariant: no clock here runs ahead of an update that is still on its way. A member's pushes
    # and ticks reach a range in the order in which it sent them. So when its tick for clock c is
    # here, all that it pushed up to c is here. That holds range by range; no clock is global.

    @property
    def slowest(self) -> int:
        """0 when there is nobody."""
        return min(self._members.values(), default=0)

    @property
    def active(self) -> frozenset[int]:
        """The members that are not resting."""
        return frozenset(member for member, clock in self._members.items() if clock < RESTING)

    def set_members(self, members: Iterable[int]) -> None:
        """The first begin together. Newcomers rest until they say where they begin.

        If a newcomer began at 0, all others would wait for it to pass through every clock so far.
        """
        start = RESTING if self._members else 0
        known = {**self._strangers, **self._members}
        self._members = {member: known.get(member, start) for member in members}
        for member in self._members:
            self._strangers.pop(member, None)

    def tick(self, member: int, clock: int) -> None:
        """`member` has ended `clock`. Its commands come in order, so the last one counts."""
        known = self._members if member in self._members else self._strangers
        known[member] = clock + 1

    def state(self) -> list[list[list[int]]]:
        return [
            [[member, clock] for member, clock in known.items()]
            for known in (self._members, self._strangers)
        ]

    @classmethod
    def from_state(cls, state: list[list[list[int]]]) -> Clocks:
        clocks = cls()
        clocks._members, clocks._strangers = (
            {int(member): int(clock) for member, clock in known} for known in state
        )
        return clocks
