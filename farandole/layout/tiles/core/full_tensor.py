"""Puts divided tensors together on every shard, for functions that need all of a tensor.

Every shard then computes the same. This is exact for any function, and divides no work.

    forward    each shard's samples ──▶ all samples, on every shard
    backward   a sample's owner ◀── what every shard found for it, added up

Shards' losses add up to the loss of the batch. So the gradients of all shards add up too: that of a
weight once, though every shard has computed with it, and that of a sample where its owner is.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree

from farandole.layout.shards.batch_shard import BatchShard, RowSpans, same_memory, version_of
from farandole.layout.tiles.core.flow import Flow
from farandole.layout.tiles.core.grid import relative
from farandole.layout.tiles.core.intervals import Interval
from farandole.layout.tiles.core.refusals import refuse
from farandole.layout.tiles.core.shard_group import ShardGroup
from farandole.layout.tiles.core.snapshot import snapshot
from farandole.layout.tiles.core.tile import Divided, Tile, cut
from farandole.layout.tiles.halo.exchange import exchanged, gather


def full_tensor(value: Divided) -> torch.Tensor:
    """Returns all of a divided tensor, on every shard; differentiable. *Together.*"""
    if isinstance(value, Tile):
        return _full_tile(value)
    assert isinstance(value, BatchShard)
    shards = value.flow.shards
    result: torch.Tensor = _FullBatch.apply(shards, shards.next(), value.spans, value.own)
    return result


def _full_tile(tile: Tile) -> torch.Tensor:
    flow = tile.flow
    if not tile.divided:
        return tile.own_pieces()[0]
    nothing = ((Interval(0, 0),),) * len(tile.axes)
    everything = tuple((Interval(0, size),) for size in tile.sizes)
    # Where all shards are in one process, one of them is enough.
    needs = tuple(
        nothing if shard and flow.shards.all_here else everything
        for shard in range(flow.grid.shards)
    )
    owned = [relative(tile.owned(shard), tile.held(shard)) for shard in flow.shards.mine]
    found = flow.copies(tile.sizes, tile.axes, needs)
    return gather(flow.shards, found, needs, tile.pieces, owned, 0.0)[0]


class _FullBatch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, shards: ShardGroup, number: int, spans: RowSpans, own: torch.Tensor
    ) -> torch.Tensor:
        ctx.shards, ctx.number, ctx.spans = shards, number, spans
        return _all_rows(shards, number, spans, own)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        shards: ShardGroup = ctx.shards
        spans: RowSpans = ctx.spans
        (gradient,) = gradients
        # Every shard has computed with all samples and has a part of each sample's gradient. It
        # sends each owner the part for that owner's samples, and adds up the parts that come for
        # its own. This is the forward's exchange in the other direction.
        others = [other for other in range(spans.shards) if other != spans.shard]
        outgoing = {
            other: gradient[spans.span(other)].contiguous()
            for other in others
            if not spans.range_of(other).spare
        }
        incoming = exchanged(shards, ctx.number, True, outgoing, others)
        own = spans.here(gradient).clone()
        if spans.own_range.spare:
            # These rows are copies of a sample that has another owner, who gets all of its
            # gradient.
            return None, None, None, own.zero_()
        for _, part in incoming:
            own += part
        return None, None, None, own


def _all_rows(shards: ShardGroup, number: int, spans: RowSpans, own: torch.Tensor) -> torch.Tensor:
    """The rows of all shards."""
    counting = [each for each in range(spans.shards) if not spans.range_of(each).spare]
    others = [each for each in range(spans.shards) if each != spans.shard]
    # A spare shard gets all samples, as the others do, and sends none: its own are copies.
    outgoing = dict.fromkeys(others, own.contiguous()) if spans.shard in counting else {}
    incoming = [each for each in counting if each != spans.shard]
    known = {spans.shard: own, **dict(exchanged(shards, number, False, outgoing, incoming))}
    return torch.cat([known[each] for each in counting])


def all_rows_for_loss(value: BatchShard) -> torch.Tensor:
    """All samples, for a loss that is the same on all shards and counts by their share of the
    samples, in all once. *Together.*

    Then a shard's own rows get their whole gradient from what this shard made of them, and nothing
    has to travel back.
    """
    shards = value.flow.shards
    result: torch.Tensor = _FullBatchForLoss.apply(shards, shards.next(), value.spans, value.own)
    return result


class _FullBatchForLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, shards: ShardGroup, number: int, spans: RowSpans, own: torch.Tensor
    ) -> torch.Tensor:
        ctx.spans = spans
        return _all_rows(shards, number, spans, own)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        spans: RowSpans = ctx.spans
        own_range = spans.own_range
        # `Tiling` has weighed this shard's loss by rows / samples. Every shard computes the whole
        # gradient of its own rows, so that weight is divided out again.
        of_all = 0.0 if own_range.spare else spans.samples / len(own_range.rows)
        return None, None, None, spans.here(gradients[0]) * of_all


def compute_replicated(
    flow: Flow, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """A function of divided tensors, computed from all of them, by every shard alike. *Together.*

    Raises `UserError` if the function changes one of them in place: only a copy would change.
    """
    leaves, spec = pytree.tree_flatten((args, kwargs))
    given: list[tuple[Divided, torch.Tensor]] = []
    for at, leaf in enumerate(leaves):
        if isinstance(leaf, Divided):
            leaves[at] = full_tensor(leaf)
            given.append((leaf, leaves[at]))
    # `full_tensor` makes copies. A write to a copy would be lost without a word, so versions are
    # compared before and after.
    versions = [version_of(whole) for _, whole in given]
    args, kwargs = pytree.tree_unflatten(leaves, spec)
    result = function(*args, **kwargs)
    if versions != [version_of(whole) for _, whole in given]:
        raise refuse(flow, function)
    kept = [
        leaf
        for leaf in leaves
        if isinstance(leaf, torch.Tensor) and all(leaf is not whole for _, whole in given)
    ]
    return pytree.tree_map_only(
        torch.Tensor, lambda leaf: _divided_again(flow, leaf, given, kept), result
    )


def _divided_again(
    flow: Flow,
    result: torch.Tensor,
    given: Sequence[tuple[Divided, torch.Tensor]],
    kept: Sequence[torch.Tensor],
) -> torch.Tensor:
    """What has the shape of what came in is divided like that again, so that not every shard has to
    compute all that follows. What is in the memory of a whole tensor stays as it is."""
    if result.layout is not torch.strided or any(same_memory(result, each) for each in kept):
        return result
    # A result in the memory of a copy is a view in the plain model. It remembers its source, so
    # that a later write to it makes the source unusable and not silently out of date.
    sources = [weakref.ref(each) for each, whole in given if same_memory(result, whole)]
    for like, _ in given:
        if isinstance(like, Tile) and result.shape == like.shape and like.divided:
            tile = cut(flow, result, like.axes)
            tile.copied = bool(sources)
            return tile
        if isinstance(like, BatchShard) and result.dim() and result.shape[0] == like.count:
            rows = like.like(like.spans.here(result))
            rows.source = next(iter(sources), None)
            return rows
    return snapshot(result, sources) if sources else result
