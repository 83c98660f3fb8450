"""Which functions of torch treat samples one by one, and how a shard computes its own."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from farandole.layout.shards import functions as row
from farandole.layout.shards import layers
from farandole.layout.shards import shapes as shape
from farandole.layout.shards.batch_shard import BatchHandler, BatchShard
from farandole.layout.tiles.core.side_effects import has_side_effects
from farandole.layout.tiles.core.table import (
    ACTIVATIONS,
    CONVERSIONS,
    IN_PLACE,
    METHODS,
    NEW,
    PLACES,
    POINTWISE,
    changing,
    found,
)

_OVER: tuple[tuple[BatchHandler, str], ...] = (
    (
        row.over(1),
        """
        sum nansum mean nanmean var std var_mean std_mean prod amax amin argmax argmin aminmax all
        any logsumexp softmax log_softmax softmin cumsum cumprod cummax cummin logcumsumexp median
        nanmedian count_nonzero narrow select index_select
        """,
    ),
    (row.over(1, -1), "sort argsort mode glu"),
    (row.over(2, -1), "topk kthvalue diff"),
    (row.over(2), "norm vector_norm"),
    (row.over(2, 0), "chunk split tensor_split"),
    (row.over(1, 0), "unbind"),
    (row.over_or_pointwise, "max min"),
)
"""What is computed over dimensions, or along one."""

_SHAPES: dict[str, BatchHandler] = {
    "view": shape.reshape,
    "reshape": shape.reshape,
    "view_as": shape.view_as,
    "reshape_as": shape.view_as,
    "flatten": shape.flatten,
    "unflatten": shape.unflatten,
    "permute": shape.permute,
    "transpose": shape.transpose,
    "swapaxes": shape.transpose,
    "swapdims": shape.transpose,
    "movedim": shape.transpose,
    "moveaxis": shape.transpose,
    "unsqueeze": shape.unsqueeze,
    "squeeze": shape.squeeze,
    "expand": shape.expand,
    "expand_as": shape.expand_as,
    "repeat": shape.repeat,
    "tile": shape.repeat,
    "flip": shape.flip,
    "cat": layers.joined,
    "concat": layers.joined,
    "concatenate": layers.joined,
    "stack": layers.joined,
    "__getitem__": shape.getitem,
    "__setitem__": shape.setitem,
    "matmul": layers.matmul,
    "__matmul__": layers.matmul,
    "bmm": layers.matmul,
    "einsum": layers.einsum,
    "rand_like": row.drawn_like,
    "randn_like": row.drawn_like,
    "randint_like": row.drawn_like,
}


def _requires_grad(like: BatchShard, function: Any, args: row.Args, named: row.Named) -> bool:
    return like.own.requires_grad


def _is_leaf(like: BatchShard, function: Any, args: row.Args, named: row.Named) -> bool:
    return not like.own.requires_grad


def _is_contiguous(like: BatchShard, function: Any, args: row.Args, named: row.Named) -> bool:
    return like.own.is_contiguous(*args[1:], **named)


def _data(like: BatchShard, function: Any, args: row.Args, named: row.Named) -> BatchShard:
    return like.viewed(like.own.detach())


def _where(like: BatchShard, function: Any, args: row.Args, named: row.Named) -> Any:
    # With a condition alone, `where` returns positions, and those of one shard would begin at zero.
    if len(args) + len(named) < 3:  # where a condition holds: counted over all samples
        return NotImplemented
    return row.pointwise(like, function, args, named)


def _elements() -> dict[Any, BatchHandler]:
    table: dict[Any, BatchHandler] = {}
    for place in PLACES:
        # As in the table of tiles: first everything that might write is refused, then the known
        # functions get their handlers.
        table |= dict.fromkeys(changing(place), row.cannot_change)
    for place in PLACES:
        names = POINTWISE + ACTIVATIONS + (METHODS if place is Tensor else "")
        table |= dict.fromkeys(found(place, names), row.pointwise)
        table |= dict.fromkeys(found(place, IN_PLACE + " copy_"), row.in_place)
        table |= dict.fromkeys(found(place, "where"), _where)
        table |= dict.fromkeys(found(place, "prelu"), row.with_axes(2))
    table |= dict.fromkeys(found(Tensor, CONVERSIONS), row.converted)
    table |= dict.fromkeys(found(Tensor, NEW), row.of_its_kind)
    return table


def _layers() -> dict[Any, BatchHandler]:
    table: dict[Any, BatchHandler] = {}
    for axes in (1, 2, 3):
        layer = row.alone(lambda x, *args, axes=axes, **named: x.dim() == axes + 2)
        names = (
            f"conv{axes}d conv_transpose{axes}d max_pool{axes}d avg_pool{axes}d lp_pool{axes}d "
            f"adaptive_avg_pool{axes}d adaptive_max_pool{axes}d max_pool{axes}d_with_indices "
            f"adaptive_max_pool{axes}d_with_indices"
        )
        for place in (F, torch, torch._C._nn):
            table |= dict.fromkeys(found(place, names), layer)
        table |= dict.fromkeys(found(F, f"dropout{axes}d"), layers.dropout)
    table |= dict.fromkeys(found(F, "dropout alpha_dropout feature_alpha_dropout"), layers.dropout)
    return table | {
        torch.dropout: layers.dropout,
        F.linear: row.with_axes(2),
        F.batch_norm: layers.batch_norm,
        F.group_norm: row.with_axes(2),
        F.instance_norm: row.with_axes(3, _own_statistics),
        F.layer_norm: row.alone(_normalises_behind),
        F.rms_norm: row.alone(_normalises_behind),
        F.local_response_norm: row.with_axes(3),
        F.interpolate: row.with_axes(3),
        F.pad: row.alone(lambda x, pad, *args, **named: len(pad) // 2 < x.dim()),
        F.pixel_shuffle: row.with_axes(4),
        F.pixel_unshuffle: row.with_axes(4),
        F.channel_shuffle: row.with_axes(3),
        F.unfold: row.with_axes(4),
        F.fold: row.with_axes(3),
        F.normalize: row.over(2, 1),
        F.one_hot: row.alone(lambda x, num_classes=-1: num_classes >= 0),
        F.embedding: layers.embedding,
        F.affine_grid: layers.affine_grid,
        F.grid_sample: row.pointwise,
        F.scaled_dot_product_attention: layers.attention,
        torch.linalg.vector_norm: row.over(2),
    }


def _own_statistics(
    x: BatchShard,
    running_mean: Any = None,
    running_var: Any = None,
    weight: Any = None,
    bias: Any = None,
    use_input_stats: bool = True,
    *_: Any,
    **__: Any,
) -> bool:
    """Running statistics are means over the samples."""
    return running_mean is None or not use_input_stats


def _normalises_behind(x: BatchShard, normalized_shape: Any, *args: Any, **named: Any) -> bool:
    return len(normalized_shape) < x.dim()


def _about() -> dict[Any, BatchHandler]:
    return {
        Tensor.requires_grad.__get__: _requires_grad,  # type: ignore[attr-defined]
        Tensor.is_leaf.__get__: _is_leaf,  # type: ignore[attr-defined]
        Tensor.data.__get__: _data,  # type: ignore[attr-defined]
        Tensor.is_contiguous: _is_contiguous,
        **dict.fromkeys(has_side_effects(), row.cannot_change),
    }


@functools.cache  # it never changes
def batch_functions() -> Mapping[Any, BatchHandler]:
    """All of them, by function."""
    table = _elements()
    for place in (torch, Tensor, F, torch.special):
        for handler, names in (*_OVER, *((handler, name) for name, handler in _SHAPES.items())):
            table |= dict.fromkeys(found(place, names), handler)
    return MappingProxyType({**table, **_layers(), **_about()})
