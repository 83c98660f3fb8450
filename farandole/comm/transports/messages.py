"""What travels between two ranks, and the error that says that a rank is gone.

A file of its own because every part of a transport needs it, below and above the `Transport` class.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from farandole.errors import FarandoleError

Message = tuple[int, torch.Tensor]
"""A peer, and what goes to it or where what comes from it belongs."""


class PeerLost(FarandoleError):  # noqa: N818  (the group turns it into a CommError)
    """Ranks that died, or did not answer in time. The transport cannot be used any more."""

    def __init__(self, ranks: Sequence[int], reason: str, *, is_late: bool = False) -> None:
        """`is_late`: the ranks may still live, and answer if they were given more time."""
        self.ranks = tuple(ranks)
        self.reason = reason
        self.is_late = is_late
        super().__init__(f"{name_ranks(ranks)} {reason}")

    @classmethod
    def late(cls, ranks: Sequence[int], timeout_seconds: float) -> PeerLost:
        """Ranks that did not answer in time."""
        return cls(ranks, f"did not answer within {timeout_seconds:g} s", is_late=True)

    def naming(self, ranks: Sequence[int]) -> PeerLost:
        """The same loss, of other ranks: by other numbers, or of those who are really missing."""
        return PeerLost(ranks, self.reason, is_late=self.is_late)


def name_ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


@contextmanager
def numbered(ranks: Sequence[int]) -> Iterator[None]:
    """Inside, rank i is what outside is `ranks[i]`: whoever gets lost is named by that."""
    try:
        yield
    except PeerLost as lost:
        raise lost.naming([ranks[rank] for rank in lost.ranks]) from lost
