"""What is computed for every pixel alone, or along one dimension that a shard has whole."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree

from farandole.errors import UserError
from farandole.layout.nested_tensors import tensors_of
from farandole.layout.tiles.core.flow import Flow, Handler
from farandole.layout.tiles.core.frames import (
    aligned,
    common_frame,
    frame_of,
    tile_of,
    whole_along,
)
from farandole.layout.tiles.core.grid import CHANNELS
from farandole.layout.tiles.core.spelling import position
from farandole.layout.tiles.core.tile import Tile


def pointwise(function: Callable[..., Any]) -> Handler:
    """Of a function that makes every element of its result from elements in the same place."""
    compute = _computed(function)
    place = _place_of("inplace", function)
    if place is None:
        return compute
    change = in_place(function)

    def handler(flow: Flow, *args: Any, **kwargs: Any) -> Any:
        changes = kwargs.get("inplace", args[place] if len(args) > place else False)
        return (change if changes else compute)(flow, *args, **kwargs)

    return handler


def _place_of(name: str, function: Callable[..., Any]) -> int | None:
    """Where an argument stands in a function that is written in Python."""
    try:
        names = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # written in C++
        return None
    return names.index(name) if name in names else None


def _computed(function: Callable[..., Any]) -> Handler:
    def handler(flow: Flow, *args: Any, **kwargs: Any) -> Any:
        tensors = tensors_of((args, kwargs))
        if len(tensors) == 1 and args and tensors[0] is args[0]:  # most have one tensor
            return tensors[0].map(lambda piece: function(piece, *args[1:], **kwargs))
        frame = common_frame(flow, tensors)
        if frame is None:
            return flow.otherwise(flow, function, args, kwargs)
        leaves, spec = pytree.tree_flatten((args, kwargs))
        columns = [
            aligned(flow, leaf, frame) if isinstance(leaf, torch.Tensor) else None
            for leaf in leaves
        ]
        pieces = []
        for index in range(len(flow.shards.mine)):
            here = [
                leaf if column is None else column[index]
                for leaf, column in zip(leaves, columns, strict=True)
            ]
            shard_args, shard_kwargs = pytree.tree_unflatten(here, spec)
            pieces.append(function(*shard_args, **shard_kwargs))
        result = tile_of(flow, frame, pieces)
        sources = (tensor.sources for tensor in tensors if isinstance(tensor, Tile))
        result.sources = frozenset().union(*sources)
        return result

    return handler


def in_place(function: Callable[..., Any]) -> Handler:
    """Of a function that changes its first argument, and returns it."""
    compute = _computed(function)

    def handler(flow: Flow, first: Any, *args: Any, **kwargs: Any) -> Any:
        tensors = tensors_of((first, args, kwargs))
        frame = common_frame(flow, tensors)
        if not isinstance(first, Tile) or frame is None:
            return cannot_change(function)(flow)
        # Invariant: a change in place is seen by everybody who holds the tensor. A copy that stands
        # for a view, or a tensor that would have to be divided otherwise first, cannot keep it.
        if first.copied or not frame_of(first).divided_like(flow, frame):  # a copy would change
            return cannot_change(function)(flow)
        shared = _share_memory(first.pieces)
        # Shards in one process may share memory, for instance of a mean that all of them have. `x
        # += 1` by each of them would add it several times.
        change = _computed(_once(function)) if shared else compute
        result = change(flow, first, *args, **kwargs)
        first.pieces, first.margin, first.sources = result.pieces, result.margin, result.sources
        return first

    return handler


def _share_memory(pieces: Sequence[torch.Tensor]) -> bool:
    """Whether shards in this process have the same values in one place."""
    places = [piece.data_ptr() for piece in pieces]
    return len(set(places)) < len(places)


def _once(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that changes every place in memory once, whichever shard comes first."""
    done: dict[int, torch.Tensor] = {}

    def change(piece: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        place = piece.data_ptr()
        if place not in done:
            done[place] = function(piece, *args, **kwargs)
        return done[place] if done[place].shape == piece.shape else piece.clone()

    return change


def cannot_change(function: Callable[..., Any]) -> Handler:
    """Of a function that changes a tensor, which cannot be done to a tile: if its samples were
    handed off, only the copy would change."""

    def handler(flow: Flow, *args: Any, **kwargs: Any) -> Any:
        name = getattr(function, "__name__", str(function))
        raise UserError(
            f"{flow.layer}: {name} cannot change a tensor on tiles in place. Write it as a "
            "function with a result (x = x + …, torch.where, torch.cat), or end the tiles before "
            "this layer."
        )

    return handler


def converted(function: Callable[..., Any]) -> Handler:
    """Of a change of type or device, perhaps to that of another tensor, whatever its shape."""

    def handler(flow: Flow, first: Any, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = pytree.tree_map_only(Tile, lambda tile: tile.pieces[0], (args, kwargs))
        if not isinstance(first, Tile):
            return function(first, *args, **kwargs)
        pieces = [function(piece, *args, **kwargs) for piece in first.pieces]
        return first.like(pieces) if isinstance(pieces[0], torch.Tensor) else pieces[0]

    return handler


def where(flow: Flow, condition: Any, *args: Any, **kwargs: Any) -> Any:
    """`torch.where`; with a condition alone, it counts positions of the whole tensor."""
    if not args and not kwargs:
        return flow.otherwise(flow, torch.where, (condition,), {})
    return pointwise(torch.where)(flow, condition, *args, **kwargs)


def rrelu(
    flow: Flow,
    input: Tile,
    lower: float = 1.0 / 8,
    upper: float = 1.0 / 3,
    training: bool = False,
    inplace: bool = False,
) -> Any:
    """`F.rrelu`; in training it draws a slope for every element that is negative."""
    if training and inplace:
        return cannot_change(F.rrelu)(flow)
    if training:
        return flow.otherwise(flow, F.rrelu, (input, lower, upper, training), {})
    return pointwise(F.rrelu)(flow, input, lower, upper, False, inplace)


def prelu(flow: Flow, input: Tile, weight: torch.Tensor) -> Any:
    """`F.prelu`: one slope for all, or one for each channel."""
    channels = input.sizes[0] if input.axes else 1
    if weight.dim() > 1 or weight.numel() not in (1, channels):
        return flow.otherwise(flow, F.prelu, (input, weight), {})
    if weight.numel() == 1:
        return input.map(lambda piece: F.prelu(piece, weight))
    pieces = [
        F.prelu(piece, weight[input.held(shard)[0].slice]) if piece.numel() else piece
        for shard, piece in zip(flow.shards.mine, input.pieces, strict=True)
    ]
    return input.like(pieces)


def along(function: Callable[..., Any], default: int | None = None, keeps: bool = True) -> Handler:
    """Of a function over one dimension, such as a softmax: exact if shards have that whole. Other
    shards' channels are asked for; other parts of the image are not.

    `default`: the dimension that is meant if none is given. `keeps`: whether the result has as many
    elements; it has one otherwise.
    """

    place = (_place_of("dim", function) or 1) - 1  # behind the input

    def handler(flow: Flow, input: Any, *args: Any, **kwargs: Any) -> Any:
        if any(isinstance(each, torch.Tensor) for each in (*args, *kwargs.values())):
            return pointwise(function)(flow, input, *args, **kwargs)  # `torch.max` of two
        given = kwargs.get("dim", args[place] if len(args) > place else default)
        if not isinstance(input, Tile) or not isinstance(given, int) or isinstance(given, bool):
            return flow.otherwise(flow, function, (input, *args), kwargs)
        at = position(given, len(input.axes) + 1)
        if (input.is_divided(at) and input.axes[at - 1] != CHANNELS) or (at == 0 and not keeps):
            return flow.otherwise(flow, function, (input, *args), kwargs)
        whole = whole_along(input, [at])
        results = [function(piece, *args, **kwargs) for piece in whole.pieces]
        if not isinstance(results[0], torch.Tensor):  # values and where they were found
            columns = [list(column) for column in zip(*results, strict=True)]
            kind = type(results[0])
            return kind([_reduced(whole, at, column) for column in columns])
        if not keeps:
            return _reduced(whole, at, results)
        made = whole.like(results)
        if whole is input:
            return made
        return tile_of(flow, frame_of(input), aligned(flow, made, frame_of(input)))

    return handler


def _reduced(tile: Tile, at: int, pieces: Sequence[torch.Tensor]) -> Tile:
    """A tile of which one dimension is gone, or has one element left."""
    sizes, axes, margin = list(tile.sizes), list(tile.axes), list(tile.margin)
    if pieces[0].dim() == len(axes) + 1:
        sizes[at - 1], axes[at - 1], margin[at - 1] = 1, None, (0, 0)
    else:
        del sizes[at - 1], axes[at - 1], margin[at - 1]
    made = Tile(tile.flow, pieces, sizes, tuple(axes), tuple(margin))
    made.sources = tile.sources
    return made
