"""Who is really missing, when everybody waits for somebody.

In a ring, rank 0 waits for rank 3, which waits for rank 2, which was stopped. Rank 0 must not blame
rank 3. So a rank that fails first writes down whom it waited for, where all can read it, and then
follows the trail: whoever is waited for and has written nothing is the one that is missing. A rank
that leaves and cannot tell the others otherwise writes that it waits for itself.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from torch.distributed import Store

_GRACE_SECONDS = 1.0  # for the others to notice and write
_PAUSE_SECONDS = 0.02


class Board(Protocol):
    """Where ranks write whom they waited for. One that cannot be reached raises `RuntimeError`."""

    def write(self, waited_for: Sequence[int]) -> None:
        """This rank's statement."""

    def read(self) -> Mapping[int, Sequence[int]]:
        """All statements so far, by rank."""


class StoreBoard:
    """In a store that the ranks of one group share."""

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self._store = store
        self._rank = rank
        self._keys = [f"missed-by/{rank}" for rank in range(size)]

    def write(self, waited_for: Sequence[int]) -> None:
        self._store.set(self._keys[self._rank], json.dumps(list(waited_for)))

    def read(self) -> Mapping[int, Sequence[int]]:
        return {
            rank: json.loads(self._store.get(key))
            for rank, key in enumerate(self._keys)
            if self._store.check([key])
        }


def who_is_missing(
    board: Board,
    rank: int,
    waited_for: Sequence[int],
    has_ended: Callable[[int], bool] = lambda rank: False,
) -> list[int]:
    """Tells the others whom this rank waited for; returns whom to blame, as far as is known.

    Those who `has_ended` will not write any more, and need not be given time to.
    """
    missing: list[int] = []
    try:
        # Written before the first look: two ranks that blame each other must both be readable, or
        # each would take the other for the one that is missing.
        board.write(waited_for)
        deadline = time.monotonic() + _GRACE_SECONDS
        while time.monotonic() < deadline:
            statements = board.read()
            left = who_have_left(statements)
            missing = left or trail_ends(rank, statements)
            if left or all(map(has_ended, missing)):  # also when all have spoken: a circle
                break
            time.sleep(_PAUSE_SECONDS)  # those who fail with us write now
    except RuntimeError:
        pass  # the board is gone too
    return missing or list(waited_for)


def who_have_left(statements: Mapping[int, Sequence[int]]) -> list[int]:
    """Those who say so: no trail need be followed."""
    return sorted(rank for rank, waited_for in statements.items() if rank in waited_for)


def trail_ends(start: int, statements: Mapping[int, Sequence[int]]) -> list[int]:
    """The ranks reached from `start` by following who waits for whom, that say nothing."""
    seen, ends, trail = {start}, [], list(statements.get(start, ()))
    while trail:
        rank = trail.pop()
        if rank in seen:
            continue
        seen.add(rank)
        if rank in statements:
            trail.extend(statements[rank])
        else:
            ends.append(rank)
    return sorted(ends)
