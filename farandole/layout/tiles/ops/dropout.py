"""Dropout that drops what one process would have dropped.

All shards have the same random state, and each draws for the whole tensor: of what is drawn it
keeps its own part. For a moment that takes as much memory as one whole tensor; where whole channels
are dropped, it takes next to none.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from farandole.layout.tiles.core.flow import Flow
from farandole.layout.tiles.core.tile import Tile
from farandole.layout.tiles.ops.pointwise import cannot_change, in_place, pointwise

_ALPHA = 1.7580993408473766  # minus what SELU goes to, as torch has it


def dropout(
    flow: Flow, input: Tile, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Any:
    """`F.dropout`."""
    if not 0.0 <= p <= 1.0:
        return flow.otherwise(flow, F.dropout, (input, p, training), {})
    if not training or p == 0.0:
        return input
    # Invariant: every shard draws the same numbers, as many as one process would. A shard that drew
    # for its own part only would change the random state of everything that follows.
    kept = F.dropout(_drawn_like(input, torch.ones), p)
    return _scaled(flow, input, kept, inplace)


def feature_dropout(function: Callable[..., Any], spatial: int) -> Callable[..., Any]:
    """`F.dropout1d`, `F.dropout2d` and `F.dropout3d`: whole channels."""

    def handler(
        flow: Flow, input: Tile, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Any:
        known = 0.0 <= p <= 1.0 and len(input.axes) == spatial + 1
        if not known and inplace:
            return cannot_change(function)(flow)
        if not known:
            return flow.otherwise(flow, function, (input, p, training), {})
        if not training or p == 0.0:
            return input
        channels = torch.ones(_by_channel(input), dtype=input.dtype, device=input.device)
        return _scaled(flow, input, torch.feature_dropout(channels, p, True), inplace)

    return handler


def alpha_dropout(
    flow: Flow, input: Tile, p: float = 0.5, training: bool = False, inplace: bool = False
) -> Any:
    """`F.alpha_dropout`."""
    if not 0.0 <= p <= 1.0:
        return flow.otherwise(flow, F.alpha_dropout, (input, p, training), {})
    if not training or p == 0.0:
        return input
    return _alpha(flow, input, p, _drawn_like(input, torch.empty), inplace)


def feature_alpha_dropout(
    flow: Flow, input: Tile, p: float = 0.5, training: bool = False, inplace: bool = False
) -> Any:
    """`F.feature_alpha_dropout`."""
    if not 0.0 <= p <= 1.0:
        return flow.otherwise(flow, F.feature_alpha_dropout, (input, p, training), {})
    if not training or p == 0.0:
        return input
    channels = torch.empty(_by_channel(input), dtype=input.dtype, device=input.device)
    return _alpha(flow, input, p, channels, inplace)


def _alpha(flow: Flow, input: Tile, p: float, noise: torch.Tensor, inplace: bool) -> Any:
    """What is dropped becomes a constant, and all is moved so that mean and variance stay."""
    if p == 1.0:
        return _scaled(flow, input, noise.zero_(), inplace)
    noise.bernoulli_(1 - p)
    scale = 1.0 / math.sqrt((_ALPHA * _ALPHA * p + 1) * (1 - p))
    moved = (noise - 1).mul_(_ALPHA * scale).add_(_ALPHA * scale * p)
    result = _scaled(flow, input, noise.mul_(scale), inplace)
    return (in_place(torch.Tensor.add_) if inplace else pointwise(torch.add))(flow, result, moved)


def _scaled(flow: Flow, input: Tile, by: torch.Tensor, inplace: bool) -> Any:
    multiply = in_place(torch.Tensor.mul_) if inplace else pointwise(torch.mul)
    return multiply(flow, input, by)


def _by_channel(input: Tile) -> tuple[int, ...]:
    return (input.rows, input.sizes[0], *(1,) * (len(input.axes) - 1))


def _drawn_like(input: Tile, make: Callable[..., torch.Tensor]) -> torch.Tensor:
    """A whole tensor, drawn in the usual order of memory: all shards draw the same, however their
    pieces lie."""
    return make(input.shape, dtype=input.dtype, device=input.device)
