"""How long each worker takes for a piece, in medians of the pass: its pace. 1 if unknown.

It tells who is slow before a piece is late:

- Towards the end of a pass, a worker gets no piece that the others would be through with sooner.
- The last piece of a slow worker is given out again as soon as somebody could end it sooner.

Pieces differ, and so do the moments at which workers are interrupted: what follows from a pace
costs time where it is wrong, and never changes a result.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

SLOW: Final = 1.5
"""A worker, or a piece, that takes so many times as long as others is slow."""

_LEAST_SECONDS = 0.001  # pieces that take less are not worth a decision


class Paces:
    def __init__(self) -> None:
        self._known: dict[str, float] = {}

    def of(self, worker: str) -> float:
        return self._known.get(worker, 1.0)

    def note(self, worker: str, seconds: float, typical: float) -> None:
        """It has taken so long for a piece, of which the typical one took `typical` seconds."""
        if typical >= _LEAST_SECONDS:
            self._known[worker] = seconds / typical

    def note_at_least(self, worker: str, seconds: float, typical: float) -> None:
        """As `note`, and it is not done yet."""
        if typical >= _LEAST_SECONDS:
            self._known[worker] = max(seconds / typical, self.of(worker))

    def forget(self, worker: str) -> None:
        """It is lost, and another may get its name."""
        self._known.pop(worker, None)

    def leaves(self, worker: str, others: Collection[str], left: int) -> bool:
        """Whether the `others`, who are at work, would be through with all `left` pieces that
        nobody has begun before this worker were with one of them."""
        if not others:
            return False
        slowest = max(self.of(other) for other in others)
        return self.of(worker) > slowest * max(SLOW, left / len(others) + 1)

    def would_overtake(self, worker: str, other: str, elapsed: float, typical: float) -> bool:
        """Whether this worker would end the piece that `other` began `elapsed` seconds ago clearly
        sooner."""
        left = self.of(other) * typical - elapsed
        return typical >= _LEAST_SECONDS and left > SLOW * self.of(worker) * typical
