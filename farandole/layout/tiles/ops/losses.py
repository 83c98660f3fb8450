"""Losses of tiles: each shard that of its own pixels, and all shards the loss of the whole image.

The result is a plain number that every shard knows. Its gradient on a shard is that of what this
shard made of it, as for every sum over shards: the gradients of all shards are added.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree

from farandole.layout.tiles.core.flow import Flow, Handler
from farandole.layout.tiles.core.frames import (
    Frame,
    aligned,
    common_frame,
    frame_of,
    tile_of,
    whole_along,
)
from farandole.layout.tiles.core.tile import Tile
from farandole.layout.tiles.halo.exchange import sum_shards
from farandole.layout.tiles.ops.pointwise import pointwise


def elementwise(function: Callable[..., Any]) -> Handler:
    """Of a loss that compares every element of two tensors, such as `F.mse_loss`."""

    names = list(inspect.signature(function).parameters)

    def handler(flow: Flow, *args: Any, **kwargs: Any) -> Any:
        options = {**dict(zip(names, args, strict=False)), **kwargs}
        if len(args) > len(names) or not {"input", "target"} <= options.keys() <= set(names):
            return flow.otherwise(flow, function, args, kwargs)
        input, target = options.pop("input"), options.pop("target")
        reduction = options.get("reduction", "mean")
        tensors = [
            leaf
            for leaf in pytree.tree_leaves((input, target, options))
            if isinstance(leaf, torch.Tensor)
        ]
        frame = common_frame(flow, tensors)
        legacy = options.get("size_average") is not None or options.get("reduce") is not None
        # Torch divides a weighted mean in another way for each of these losses.
        weighted = function in _UNWEIGHTED and options.get("weight") is not None
        unknown = reduction not in _REDUCTIONS
        if frame is None or legacy or weighted or unknown:
            return flow.otherwise(flow, function, (input, target), options)
        if reduction == "none":
            return pointwise(function)(flow, input, target, **options)
        # A pixel in a margin is another shard's, and would be counted twice.
        frame = frame.without_margin()
        columns = {
            name: aligned(flow, value, frame)
            for name, value in {"input": input, "target": target, **options}.items()
            if isinstance(value, torch.Tensor)
        }
        sums = []
        for index in range(len(flow.shards.mine)):
            here = {name: column[index] for name, column in columns.items()}
            sums.append(function(**{**options, **here, "reduction": "sum"}))
        total = _over_shards(flow, frame, sums)
        rows = torch.broadcast_shapes(*(tuple(tensor.shape) for tensor in tensors))[0]
        count = rows * torch.Size(frame.sizes).numel()
        return total / count if reduction == "mean" else total

    return handler


def cross_entropy(
    flow: Flow,
    input: Any,
    target: Any,
    weight: torch.Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    """`F.cross_entropy`, for classes as numbers or as probabilities."""
    options: dict[str, Any] = {
        "weight": weight,
        "ignore_index": ignore_index,
        "label_smoothing": label_smoothing,
    }
    if size_average is not None or reduce is not None:
        options |= {"size_average": size_average, "reduce": reduce}
        return flow.otherwise(flow, F.cross_entropy, (input, target), options)
    return _of_classes(flow, F.cross_entropy, input, target, reduction, options)


def nll_loss(
    flow: Flow,
    input: Any,
    target: Any,
    weight: torch.Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> Any:
    """`F.nll_loss`."""
    options: dict[str, Any] = {"weight": weight, "ignore_index": ignore_index}
    if size_average is not None or reduce is not None:
        options |= {"size_average": size_average, "reduce": reduce}
        return flow.otherwise(flow, F.nll_loss, (input, target), options)
    return _of_classes(flow, F.nll_loss, input, target, reduction, options)


def _of_classes(
    flow: Flow,
    function: Callable[..., torch.Tensor],
    input: Any,
    target: torch.Tensor,
    reduction: str,
    options: dict[str, Any],
) -> Any:
    """A loss over the classes of every pixel, which are the channels: a shard needs all of them."""
    if not isinstance(input, Tile) or reduction not in _REDUCTIONS:
        named = {**options, "reduction": reduction}
        return flow.otherwise(flow, function, (input, target), named)
    input = whole_along(input, [1])
    with_classes = frame_of(input).without_margin()
    sizes, axes, margin = with_classes
    pixels = Frame(sizes[1:], axes[1:], margin[1:])
    probable = target.dim() == input.dim()
    inputs = aligned(flow, input, with_classes)
    targets = aligned(flow, target, with_classes if probable else pixels)
    if reduction == "none":
        return tile_of(
            flow,
            pixels,
            [
                _each(function, piece, wanted, {**options, "reduction": "none"})
                for piece, wanted in zip(inputs, targets, strict=True)
            ],
        )
    sums = [
        _each(function, piece, wanted, {**options, "reduction": "sum"})
        for piece, wanted in zip(inputs, targets, strict=True)
    ]
    if reduction == "sum":
        return _over_shards(flow, pixels, sums)
    # Both numbers travel in one message. The count is known to the owner of the pixels alone: which
    # of them are ignored depends on the targets.
    both = [
        torch.stack([found, _counted(found, wanted, probable, **options)])
        for found, wanted in zip(sums, targets, strict=True)
    ]
    total, count = _over_shards(flow, pixels, both)
    return total / count


def _each(
    function: Callable[..., torch.Tensor],
    piece: torch.Tensor,
    target: torch.Tensor,
    options: dict[str, Any],
) -> torch.Tensor:
    if piece.numel():
        return function(piece, target, **options)
    return piece.sum() if options["reduction"] == "sum" else piece.sum(1)


def _counted(
    like: torch.Tensor,
    target: torch.Tensor,
    probable: bool,
    weight: torch.Tensor | None,
    ignore_index: int,
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """What a mean is divided by: the pixels that count, by the weights of their classes."""
    if probable:
        return torch.full_like(like, target.numel() // max(1, target.shape[1]))
    counts = target != ignore_index
    if weight is None:
        return counts.sum().to(like.dtype)
    return weight[target[counts]].sum().to(like.dtype)


def _over_shards(flow: Flow, frame: Frame, values: list[torch.Tensor]) -> torch.Tensor:
    return sum_shards(flow.shards, flow.grid.groups_along(frame.axes), values)[0]


_REDUCTIONS = ("none", "mean", "sum")
_UNWEIGHTED = (F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss)
