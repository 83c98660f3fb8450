"""What is divided among lanes, put together on each of them: for functions that need all of it.

Every lane then computes the same. That is exact whatever the function is, and divides no work.

    forward    each lane's samples ──▶ all samples, on every lane
    backward   a sample's owner ◀── what every lane found for it, added up

Lanes' losses add up to the loss of the batch. So the gradients of all lanes add up too: that of a
weight once, though every lane has computed with it, and that of a sample where its owner is.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree

from farandole.layout.shards.rows import Rows, Spans, same_memory, version_of
from farandole.layout.tiles.core.grid import relative
from farandole.layout.tiles.core.intervals import Interval
from farandole.layout.tiles.core.lanes import Lanes
from farandole.layout.tiles.core.snapshot import snapshot
from farandole.layout.tiles.core.tile import Divided, Flow, Tile, cut, refuse
from farandole.layout.tiles.halo.exchange import gather


def whole_of(value: Divided) -> torch.Tensor:
    """All of it, on every lane; differentiable. *Together.*"""
    if isinstance(value, Tile):
        return _whole_tile(value)
    assert isinstance(value, Rows)
    lanes = value.flow.lanes
    result: torch.Tensor = _AllRows.apply(lanes, lanes.next(), value.spans, value.own)
    return result


def _whole_tile(tile: Tile) -> torch.Tensor:
    flow = tile.flow
    if not tile.divided:
        return tile.own_pieces()[0]
    nothing = ((Interval(0, 0),),) * len(tile.axes)
    everything = tuple((Interval(0, size),) for size in tile.sizes)
    # Where all lanes are in one process, one of them is enough.
    needs = tuple(
        nothing if lane and flow.lanes.all_here else everything for lane in range(flow.grid.lanes)
    )
    owned = [relative(tile.owned(lane), tile.held(lane)) for lane in flow.lanes.mine]
    found = flow.copies(tile.sizes, tile.axes, needs)
    return gather(flow.lanes, found, needs, tile.pieces, owned, 0.0)[0]


class _AllRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, lanes: Lanes, number: int, spans: Spans, own: torch.Tensor
    ) -> torch.Tensor:
        ctx.lanes, ctx.number, ctx.spans = lanes, number, spans
        return _told(lanes, number, spans, own)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        lanes: Lanes = ctx.lanes
        spans: Spans = ctx.spans
        (gradient,) = gradients
        others = [other for other in range(spans.lanes) if other != spans.lane]
        for other in others:
            if not spans.share_of(other).spare:
                lanes.post(other, ctx.number, True, [gradient[spans.span(other)].contiguous()])
        own = spans.here(gradient).clone()
        if spans.share.spare:
            return None, None, None, own.zero_()
        for other in others:
            own += lanes.take(other, ctx.number, True)[0]
        return None, None, None, own


def _told(lanes: Lanes, number: int, spans: Spans, own: torch.Tensor) -> torch.Tensor:
    """The rows of all lanes."""
    counting = [each for each in range(spans.lanes) if not spans.share_of(each).spare]
    known = {spans.lane: own}
    for other in range(spans.lanes):
        if other != spans.lane and spans.lane in counting:
            lanes.post(other, number, False, [own.contiguous()])
    for other in counting:
        if other != spans.lane:
            (known[other],) = lanes.take(other, number, False)
    return torch.cat([known[each] for each in counting])


def all_rows_for_loss(value: Rows) -> torch.Tensor:
    """All samples, for a loss that is the same on all lanes and counts by their share of the
    samples, in all once. *Together.*

    Then a lane's own rows get their whole gradient from what this lane made of them, and nothing
    has to travel back.
    """
    lanes = value.flow.lanes
    result: torch.Tensor = _ForLoss.apply(lanes, lanes.next(), value.spans, value.own)
    return result


class _ForLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, lanes: Lanes, number: int, spans: Spans, own: torch.Tensor
    ) -> torch.Tensor:
        ctx.spans = spans
        return _told(lanes, number, spans, own)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        spans: Spans = ctx.spans
        share = spans.share
        of_all = 0.0 if share.spare else spans.samples / len(share.rows)
        return None, None, None, spans.here(gradients[0]) * of_all


def computed_whole(flow: Flow, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A function of divided tensors, computed from all of them, by every lane alike. *Together.*

    Raises `UserError` if the function changes one of them in place: only a copy would change.
    """
    leaves, spec = pytree.tree_flatten((args, kwargs))
    given: list[tuple[Divided, torch.Tensor]] = []
    for at, leaf in enumerate(leaves):
        if isinstance(leaf, Divided):
            leaves[at] = whole_of(leaf)
            given.append((leaf, leaves[at]))
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
    """What has the shape of what came in is divided like that again, so that not every lane has to
    compute all that follows. What is in the memory of a whole tensor stays as it is."""
    if result.layout is not torch.strided or any(same_memory(result, each) for each in kept):
        return result
    sources = [weakref.ref(each) for each, whole in given if same_memory(result, whole)]
    for like, _ in given:
        if isinstance(like, Tile) and result.shape == like.shape and like.divided:
            tile = cut(flow, result, like.axes)
            tile.copied = bool(sources)
            return tile
        if isinstance(like, Rows) and result.dim() and result.shape[0] == like.count:
            rows = like.like(like.spans.here(result))
            rows.source = next(iter(sources), None)
            return rows
    return snapshot(result, sources) if sources else result
