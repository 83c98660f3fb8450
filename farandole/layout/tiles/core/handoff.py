"""Where the tiles end: every lane gets whole samples, a share of them, and goes on without tiles.

    lanes     0 1 │ 2 3  each a tile of samples a b c d       lane 0: all of a
                         ─────────────────────────────▶       lane 1: all of b   …

So the lanes stay at work behind the tiles, each on other samples; weights' gradients are summed
over lanes either way. A lane that no sample is left for computes the first one too, and counts it
zero times: so all lanes do the same, whatever the model does. Where all lanes are in one process,
the samples are simply put together.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from farandole.layout.shards.rows import Rows, share_of
from farandole.layout.tiles.core.lanes import Lanes
from farandole.layout.tiles.core.tile import Flow, Tile
from farandole.layout.tiles.core.whole import whole_of
from farandole.layout.tiles.halo.exchange import slices


def hand_off(flow: Flow, tile: Tile) -> torch.Tensor:
    """This lane's samples, as `Rows`; differentiable. *Together*, by all lanes. Where all lanes are
    here, all samples, as a plain tensor."""
    if flow.lanes.all_here:
        return whole_of(tile)
    rows = Rows(flow, _moved(flow.lanes, tile, gathers=False), tile.rows)
    rows.source = weakref.ref(tile)
    return rows


def hand_over(flow: Flow, tile: Tile) -> torch.Tensor:
    """To the first lane all samples, and to the others none; differentiable. *Together.*"""
    if flow.lanes.all_here:
        return whole_of(tile)
    return _moved(flow.lanes, tile, gathers=True)


def _moved(lanes: Lanes, tile: Tile, gathers: bool) -> torch.Tensor:
    (lane,) = lanes.mine
    pieces = tile.own_pieces()
    if not tile.divided:
        rows = share_of(lane, lanes.grid.lanes, tile.rows, gathers).rows
        # No view: it may be changed in place, and the tile must not.
        return pieces[0][rows.start : rows.stop].clone()
    result: torch.Tensor = _Shared.apply(_Move(lanes, lanes.next(), tile, gathers), pieces[0])
    return result


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
