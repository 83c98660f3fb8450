"""Adasum: adds gradients so that what they agree on is counted once.

Two vectors a and b become (1 − a·b/2|a|²) a + (1 − a·b/2|b|²) b: their sum when they are
orthogonal, their mean when they are equal. Many are combined pairwise, in a tree: ranks 0 and 1, 2
and 3, …, then those results; one that has no partner waits for the next level. So any number will
do.

All that the tree needs to know of the vectors are their dot products: each vector in it is a
combination Σ cᵢ vᵢ of the ranks' own, and dot products of combinations follow from those of the
vᵢ. So each rank gets one slice of everybody's vector, sums the dot products of the slices over
all ranks, works out the coefficients, combines its slice, and the slices come together again. That
moves as much as any all-reduce, in whatever number of ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from farandole.comm.transports.base import Transport
from farandole.schedule import piece


def coefficients(products: Sequence[Sequence[float]]) -> list[float]:
    """The weight of each vector in the result, from all dot products vᵢ·vⱼ."""
    size = len(products)
    level = [[float(i == j) for j in range(size)] for i in range(size)]

    def dot(one: list[float], other: list[float]) -> float:
        return sum(
            a * b * products[i][j] for i, a in enumerate(one) if a for j, b in enumerate(other) if b
        )

    while len(level) > 1:
        pairs = zip(level[::2], level[1::2], strict=False)
        combined = [_pair(a, b, dot(a, a), dot(a, b), dot(b, b)) for a, b in pairs]
        level = combined + level[len(combined) * 2 :]
    return level[0]


def _pair(a: list[float], b: list[float], aa: float, ab: float, bb: float) -> list[float]:
    # A vector of zeros has nothing in common with the other.
    of_a = 1.0 - ab / (2.0 * aa) if aa > 0.0 else 1.0
    of_b = 1.0 - ab / (2.0 * bb) if bb > 0.0 else 1.0
    return [of_a * x + of_b * y for x, y in zip(a, b, strict=True)]


def adasum_(transport: Transport, flat: torch.Tensor, lengths: Sequence[int]) -> None:
    """Overwrites `flat` with the combination over all ranks, for each of its tensors by itself.

    `lengths` are the tensors' numbers of elements, one after the other.
    """
    rank, size = transport.rank, transport.size
    cuts = [piece(r, size, flat.numel()) for r in range(size)]
    mine = cuts[rank]
    slices = [flat.new_empty(len(mine)) for _ in range(size)]
    transport.all_to_all([flat[cut.start : cut.stop] for cut in cuts], slices)
    rows = torch.stack(slices).double()
    # Where each tensor lies in this rank's slice.
    ends = torch.tensor(lengths).cumsum(0).tolist()
    bounds = [0, *(min(max(end - mine.start, 0), len(mine)) for end in ends)]
    parts = [rows[:, a:b] for a, b in itertools.pairwise(bounds)]
    products = torch.stack([part @ part.T for part in parts])
    transport.all_reduce(products.view(-1), "sum", "native", None)
    for part, table in zip(parts, products.tolist(), strict=True):
        weights = torch.tensor(coefficients(table), dtype=torch.float64, device=part.device)
        part[0] = weights @ part
    result = rows[0].to(flat.dtype)
    flat.copy_(transport.all_gather(result, [len(cut) for cut in cuts]))
