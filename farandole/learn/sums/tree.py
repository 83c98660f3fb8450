"""The order in which the statistics of chunks are merged: the same for any number of workers.

Floating-point sums depend on their order. So the order is a property of the chunks alone: a binary
tree, whose left half is always the largest power of two that is smaller than the whole.

    6 chunks        0 1 2 3 4 5
                    └┬┘ └┬┘ └┬┘
                     └─┬─┘   │
                       └──┬──┘

Whoever has chunks of a whole branch merges them on its own, and only the branch travels. A tree is
also more exact than a running total: its rounding errors grow with the logarithm of the chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

T = TypeVar("T")
Branch = tuple[int, int]  # the first chunk, and the one after the last


def split(branch: Branch) -> int:
    """The first chunk of the right half."""
    first, end = branch
    return first + (1 << (end - first - 1).bit_length() - 1)


def branches(first: int, end: int, total: int) -> list[Branch]:
    """The largest branches of the tree over `total` chunks that lie in these chunks, in order."""
    found: list[Branch] = []

    def visit(branch: Branch) -> None:
        low, high = branch
        if high <= first or low >= end:
            return
        if first <= low and high <= end:
            found.append(branch)
            return
        middle = split(branch)
        visit((low, middle))
        visit((middle, high))

    if total:
        visit((0, total))
    return found


def pieces(total: int, wanted: int) -> list[Branch]:
    """All chunks, cut into branches of about equal size: `wanted` of them or some more."""
    largest = max(1, total // max(1, wanted))
    largest = 1 << largest.bit_length() - 1
    return [
        branch
        for first in range(0, total, largest)
        for branch in branches(first, min(first + largest, total), total)
    ]


def reduce(branch: Branch, leaf: Callable[[int], T], merge: Callable[[T, T], T]) -> T:
    """The statistics of one branch."""
    first, end = branch
    if end - first == 1:
        return leaf(first)
    middle = split(branch)
    left = reduce((first, middle), leaf, merge)
    return merge(left, reduce((middle, end), leaf, merge))


def join(found: Mapping[Branch, T], total: int, merge: Callable[[T, T], T]) -> T:
    """The statistics of all chunks, from branches that cover each chunk once."""

    def visit(branch: Branch) -> T:
        if branch in found:
            return found[branch]
        first, end = branch
        assert end - first > 1, f"chunk {first} is in none of the branches {sorted(found)}"
        middle = split(branch)
        left = visit((first, middle))
        return merge(left, visit((middle, end)))

    return visit((0, total))
