"""Where the tiles end: every lane gets whole samples, a share of them, and goes on without tiles.

    lanes     0 1 │ 2 3  each a tile of samples a b c d       lane 0: all of a
                         ─────────────────────────────▶       lane 1: all of b   …

So the lanes stay at work behind the tiles, each on other samples; weights' gradients are summed
over lanes either way. A lane that no sample is left for computes the first one too, and counts it
zero times: so all lanes do the same, whatever the model does. Where all lanes are in one process,
the samples are simply put together.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from farandole.layout.tiles.exchange import gather, slices
from farandole.layout.tiles.grid import relative
from farandole.layout.tiles.intervals import Interval
from farandole.layout.tiles.lanes import Lanes
from farandole.layout.tiles.tile import Flow, Tile
from farandole.schedule import piece


class Share(NamedTuple):
    """Which samples a lane has behind the tiles. A spare lane's count for nothing."""

    rows: range
    spare: bool


def share_of(lane: int, lanes: int, samples: int, gathers: bool = False) -> Share:
    """`gathers`: the first lane has all samples, and the others none at all."""
    if gathers:
        return Share(range(0), spare=True) if lane else Share(range(samples), spare=False)
    rows = piece(lane, lanes, samples)
    return Share(rows, spare=False) if rows else Share(range(min(1, samples)), spare=True)


def hand_off(flow: Flow, tile: Tile, *, gathers: bool = False) -> torch.Tensor:
    """This lane's samples, whole; differentiable. *Together*, by all lanes."""
    lanes = flow.lanes
    if lanes.all_here:
        return _joined(flow, tile)
    (lane,) = lanes.mine
    pieces = tile.own_pieces()
    count = lanes.grid.lanes
    share = share_of(lane, count, tile.rows, gathers)
    flow.handed_off_rows |= {
        len(share_of(each, count, tile.rows, gathers).rows) for each in range(count)
    }
    if not tile.divided:
        return pieces[0][share.rows.start : share.rows.stop]
    result: torch.Tensor = _Shared.apply(_Move(lanes, lanes.next(), tile, gathers), pieces[0])
    return result


def _joined(flow: Flow, tile: Tile) -> torch.Tensor:
    if not tile.divided:
        return tile.pieces[0]
    grid = flow.grid
    nothing = ((Interval(0, 0),),) * len(tile.axes)
    everything = tuple((Interval(0, size),) for size in tile.sizes)
    needs = tuple(nothing if lane else everything for lane in range(grid.lanes))
    owned = [relative(tile.owned(lane), tile.held(lane)) for lane in flow.lanes.mine]
    found = flow.copies(tile.sizes, tile.axes, needs)
    return gather(flow.lanes, found, needs, tile.pieces, owned, 0.0)[0]


class _Move:
    """Who sends what to whom."""

    def __init__(self, lanes: Lanes, number: int, tile: Tile, gathers: bool) -> None:
        self.lanes, self.number = lanes, number
        (self.lane,) = lanes.mine
        self.samples = tile.rows
        self.sizes = tile.sizes
        grid = lanes.grid
        count = grid.lanes
        self.shares = [share_of(lane, count, tile.rows, gathers) for lane in range(count)]
        self.boxes = [grid.owned(lane, tile.sizes, tile.axes) for lane in range(grid.lanes)]
        # Along axes that do not divide the tile, lanes ask those with their own coordinates.
        kept = [axis for axis in range(len(grid.parts)) if axis not in tile.axes]
        here = grid.coordinates[self.lane]
        self.partners = [
            lane
            for lane, there in enumerate(grid.coordinates)
            if all(here[axis] == there[axis] for axis in kept)
        ]

    @property
    def receivers(self) -> list[int]:
        """The other lanes that get samples."""
        return [lane for lane in self.partners if lane != self.lane and self.shares[lane].rows]

    @property
    def senders(self) -> list[int]:
        """The other lanes that this one gets samples from."""
        if not self.shares[self.lane].rows:
            return []
        return [lane for lane in self.partners if lane != self.lane]

    def rows(self, lane: int) -> slice:
        rows = self.shares[lane].rows
        return slice(rows.start, rows.stop)


class _Shared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, move: _Move, own: torch.Tensor) -> torch.Tensor:
        ctx.move = move
        for to in move.receivers:
            move.lanes.post(to, move.number, False, [own[move.rows(to)].contiguous()])
        rows = move.rows(move.lane)
        result = own.new_empty((rows.stop - rows.start, *move.sizes))
        result[slices(move.boxes[move.lane])] = own[rows]
        for source in move.senders:
            (part,) = move.lanes.take(source, move.number, False)
            result[slices(move.boxes[source])] = part
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        move: _Move = ctx.move
        (gradient,) = gradients
        for source in move.senders:
            part = gradient[slices(move.boxes[source])].contiguous()
            move.lanes.post(source, move.number, True, [part])
        inside = move.boxes[move.lane]
        result = gradient.new_zeros(
            (move.samples, *(interval.length for interval in inside)),
        )
        _add(result, move, move.lane, gradient[slices(inside)])
        for to in move.receivers:
            (part,) = move.lanes.take(to, move.number, True)
            _add(result, move, to, part)
        return None, result


def _add(result: torch.Tensor, move: _Move, lane: int, part: torch.Tensor) -> None:
    if not move.shares[lane].spare:
        result[move.rows(lane)] += part


def all_samples(flow: Flow, own: torch.Tensor, samples: int) -> torch.Tensor:
    """On every lane all samples, of which each has its share; differentiable. *Together.*

    For what is the same on all lanes and counts by their share of the samples, in all once. Then
    a lane's own rows get their whole gradient from what this lane made of them, and nothing has to
    travel back.
    """
    lanes = flow.lanes
    result: torch.Tensor = _All.apply(lanes, lanes.next(), samples, own)
    return result


class _All(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, lanes: Lanes, number: int, samples: int, own: torch.Tensor
    ) -> torch.Tensor:
        (lane,) = lanes.mine
        count = lanes.grid.lanes
        shares = [share_of(each, count, samples) for each in range(count)]
        ctx.share = shares[lane]
        known = {lane: own}
        for other in range(count):
            if other != lane and not shares[lane].spare:
                lanes.post(other, number, False, [own.contiguous()])
        for other in range(count):
            if other != lane and not shares[other].spare:
                (known[other],) = lanes.take(other, number, False)
        return torch.cat([known[each] for each in range(count) if not shares[each].spare])

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        share: Share = ctx.share
        own = gradients[0][share.rows.start : share.rows.stop]
        of_all = 0.0 if share.spare else len(gradients[0]) / len(share.rows)
        return None, None, None, own * of_all
