"""Where an update is cut, so that its bits do not depend on the number of threads.

Torch gives each thread an equal share of a tensor. A thread takes whole vectors, and what is left
at the end of its share one by one, and the two round otherwise: a vector of half precision is
computed in float32 and rounded once, a single number after each operation; a product and a sum are
one operation in some loops, and two in others. Replicas on servers with more or fewer cores must
not drift apart by that, so nothing may be left but at the very end:

    ├─ thread 1 ─┼─ thread 2 ─┼─ thread 3 ─┼─ rest ─┤
      whole vectors, the same number each    alone
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import torch

VECTORS: Final = 64
"""So many numbers are whole vectors on every CPU: torch takes two at a time, of 64 bytes or less,
and numbers have 2 bytes or more."""

GRAIN: Final = 32768
"""Torch gives a thread so many numbers or more."""

Piece = tuple[torch.Tensor, torch.Tensor, Sequence[torch.Tensor]]


def pieces(
    weight: torch.Tensor, gradient: torch.Tensor, state: Sequence[torch.Tensor] = ()
) -> Iterator[Piece]:
    """What `Rule.update` gets, cut: for rules that update each number by itself, in place.

        for weight, gradient, state in pieces(weight, gradient, state):
            ...

    All must be contiguous. Mostly there are one or two pieces, and the second is short.
    """
    threads = torch.get_num_threads()
    left = weight.numel()
    if evenly_shared(left, threads) == left:
        yield weight, gradient, state
        return
    columns = [tensor.view(-1, 1) for tensor in (weight, gradient, *state)]
    while left:
        length = evenly_shared(left, threads)
        start, left = weight.numel() - left, left - length
        first, second, *others = (column.narrow(0, start, length) for column in columns)
        yield first, second, others


def evenly_shared(count: int, threads: int) -> int:
    """How many of `count` numbers torch's threads share without leaving any."""
    shares = min(threads, -(-count // GRAIN))
    if shares <= 1:
        return count  # it stays with one thread
    whole = count - count % (shares * VECTORS)
    return whole if -(-whole // GRAIN) >= shares else evenly_shared(whole, shares - 1)
