"""Sums and means over the image: each shard adds up what it owns, and all add up the shards' sums.

The result is on every shard whole, along the axes that were summed over. Its gradient on a shard is
that of what this shard made of it, so the gradients of all shards are added.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from farandole.layout.tiles.core.flow import Flow
from farandole.layout.tiles.core.spelling import positions
from farandole.layout.tiles.core.tile import Tile
from farandole.layout.tiles.halo.exchange import sum_shards


def total(
    flow: Flow,
    input: Tile,
    dim: int | Sequence[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Any:
    """`torch.sum`."""
    dims = positions(dim, input.dim())
    if _leaves_image(input, dims):
        return flow.otherwise(flow, torch.sum, (input, dims), {"keepdim": keepdim, "dtype": dtype})
    sums = [piece.sum(dims, keepdim=True, dtype=dtype) for piece in input.own_pieces()]
    return _result(flow, input, dims, keepdim, over_shards(flow, input, dims, sums))


def mean(
    flow: Flow,
    input: Tile,
    dim: int | Sequence[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Any:
    """`torch.mean`."""
    kind = dtype or input.dtype
    dims = positions(dim, input.dim())
    if _leaves_image(input, dims) or not (kind.is_floating_point or kind.is_complex):
        return flow.otherwise(flow, torch.mean, (input, dims), {"keepdim": keepdim, "dtype": dtype})
    # The sum of a large image may be beyond what half precision can hold; its mean is not.
    wide = torch.float32 if kind in (torch.float16, torch.bfloat16) else kind
    count = _count(input, dims)
    # Divided before the exchange, so that what travels has the size of a mean. Margins are left
    # out: their elements belong to other shards, which add them themselves.
    sums = [piece.sum(dims, keepdim=True, dtype=wide) / count for piece in input.own_pieces()]
    means = [each.to(kind) for each in over_shards(flow, input, dims, sums)]
    return _result(flow, input, dims, keepdim, means)


def variance(
    flow: Flow,
    input: Tile,
    dim: bool | int | Sequence[int] | None = None,
    unbiased: bool = True,
    keepdim: bool = False,
    *,
    correction: float | None = None,
) -> Any:
    """`torch.var`: the mean first, then what is left of it."""
    of_all = isinstance(dim, bool)  # and this is what is said next
    unbiased = bool(dim) if of_all else unbiased
    dims = positions(None if of_all else dim, input.dim())
    less = int(unbiased) if correction is None else correction
    if 0 in dims or not input.is_floating_point():
        options = {"correction": less, "keepdim": keepdim}
        return flow.otherwise(flow, torch.var, (input, dims), options)
    apart = input - mean(flow, input, dims, keepdim=True)
    return total(flow, apart * apart, dims, keepdim) / max(0, _count(input, dims) - less)


def deviation(
    flow: Flow,
    input: Tile,
    dim: bool | int | Sequence[int] | None = None,
    unbiased: bool = True,
    keepdim: bool = False,
    *,
    correction: float | None = None,
) -> Any:
    """`torch.std`."""
    return variance(flow, input, dim, unbiased, keepdim, correction=correction).sqrt()


def _leaves_image(input: Tile, dims: Sequence[int]) -> bool:
    """Whether no samples are left, but a part of the image on every shard."""
    others = (at for at in range(1, len(input.axes) + 1) if at not in dims)
    return 0 in dims and any(input.is_divided(at) for at in others)


def _count(input: Tile, dims: Sequence[int]) -> int:
    return math.prod(input.rows if at == 0 else input.sizes[at - 1] for at in dims)


def over_shards(
    flow: Flow, input: Tile, dims: Sequence[int], values: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Adds up what shards found along some dimensions of a tensor, for those that divide it."""
    groups = flow.grid.groups_along([input.axes[at - 1] for at in dims if at])
    return sum_shards(flow.shards, groups, values)


def _result(
    flow: Flow,
    input: Tile,
    dims: Sequence[int],
    keepdim: bool,
    values: list[torch.Tensor],
) -> Any:
    if 0 in dims:  # no batch is left, and so no tile
        value = values[0]
        if keepdim:
            return value
        return value.reshape([value.shape[at] for at in range(value.dim()) if at not in dims])
    sizes = [1 if at + 1 in dims else size for at, size in enumerate(input.sizes)]
    axes = [None if at + 1 in dims else axis for at, axis in enumerate(input.axes)]
    if not keepdim:
        kept = [at for at in range(len(sizes)) if at + 1 not in dims]
        sizes, axes = [sizes[at] for at in kept], [axes[at] for at in kept]
        values = [
            value.reshape(value.shape[0], *(value.shape[at + 1] for at in kept)) for value in values
        ]
    return Tile(flow, values, sizes, tuple(axes))
