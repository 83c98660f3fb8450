"""Where the tiles end: every shard gets whole samples, a share of them, and goes on without tiles.

    shards    0 1 │ 2 3  each a tile of samples a b c d       shard 0: all of a
                         ─────────────────────────────▶       shard 1: all of b   …

So the shards stay at work behind the tiles, each on other samples; weights' gradients are summed
over shards either way. A shard that no sample is left for computes the first one too, and counts it
zero times: so all shards do the same, whatever the model does. Where all shards are in one process,
the samples are simply put together.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from farandole.layout.shards.batch_shard import BatchShard, sample_range
from farandole.layout.tiles.core.flow import Flow
from farandole.layout.tiles.core.full_tensor import full_tensor
from farandole.layout.tiles.core.shard_group import ShardGroup
from farandole.layout.tiles.core.tile import Tile
from farandole.layout.tiles.halo.exchange import exchanged, slices


def hand_off(flow: Flow, tile: Tile) -> torch.Tensor:
    """Returns this shard's samples as a `BatchShard`; differentiable. *Together*, by all shards.

    Where all shards are here, returns all samples as a plain tensor.
    """
    if flow.shards.all_here:
        return full_tensor(tile)
    rows = BatchShard(flow, _moved(flow.shards, tile, gathers=False), tile.rows)
    rows.source = weakref.ref(tile)
    return rows


def gather_to_first(flow: Flow, tile: Tile) -> torch.Tensor:
    """To the first shard all samples, and to the others none; differentiable. *Together.*"""
    if flow.shards.all_here:
        return full_tensor(tile)
    return _moved(flow.shards, tile, gathers=True)


def _moved(shards: ShardGroup, tile: Tile, gathers: bool) -> torch.Tensor:
    (shard,) = shards.mine
    pieces = tile.own_pieces()
    if not tile.divided:
        rows = sample_range(shard, shards.grid.shards, tile.rows, gathers).rows
        # No view: it may be changed in place, and the tile must not.
        return pieces[0][rows.start : rows.stop].clone()
    result: torch.Tensor = _Shared.apply(_Move(shards, shards.next(), tile, gathers), pieces[0])
    return result


class _Move:
    """Who sends what to whom."""

    def __init__(self, shards: ShardGroup, number: int, tile: Tile, gathers: bool) -> None:
        self.shards, self.number = shards, number
        (self.shard,) = shards.mine
        self.samples = tile.rows
        self.sizes = tile.sizes
        grid = shards.grid
        count = grid.shards
        self.ranges = [sample_range(shard, count, tile.rows, gathers) for shard in range(count)]
        self.boxes = [grid.owned(shard, tile.sizes, tile.axes) for shard in range(grid.shards)]
        # Along axes that do not divide the tile, several shards have the same part. Each asks those
        # with its own coordinates there. Invariant: every part of a sample comes exactly once, and
        # in the backward its gradient goes to the shard that it came from.
        kept = [axis for axis in range(len(grid.parts)) if axis not in tile.axes]
        here = grid.coordinates[self.shard]
        self.partners = [
            shard
            for shard, there in enumerate(grid.coordinates)
            if all(here[axis] == there[axis] for axis in kept)
        ]

    @property
    def receivers(self) -> list[int]:
        """The other shards that get samples."""
        return [shard for shard in self.partners if shard != self.shard and self.ranges[shard].rows]

    @property
    def senders(self) -> list[int]:
        """The other shards that this one gets samples from."""
        if not self.ranges[self.shard].rows:
            return []
        return [shard for shard in self.partners if shard != self.shard]

    def rows(self, shard: int) -> slice:
        rows = self.ranges[shard].rows
        return slice(rows.start, rows.stop)


class _Shared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, move: _Move, own: torch.Tensor) -> torch.Tensor:
        ctx.move = move
        outgoing = {to: own[move.rows(to)].contiguous() for to in move.receivers}
        incoming = exchanged(move.shards, move.number, False, outgoing, move.senders)
        rows = move.rows(move.shard)
        result = own.new_empty((rows.stop - rows.start, *move.sizes))
        result[slices(move.boxes[move.shard])] = own[rows]
        for source, part in incoming:
            result[slices(move.boxes[source])] = part
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        move: _Move = ctx.move
        (gradient,) = gradients
        # Values came from the senders, so gradients go to them: the same boxes and samples as in
        # the forward, with senders and receivers exchanged. All posts come before the first take,
        # as there.
        outgoing = {
            source: gradient[slices(move.boxes[source])].contiguous() for source in move.senders
        }
        incoming = exchanged(move.shards, move.number, True, outgoing, move.receivers)
        inside = move.boxes[move.shard]
        result = gradient.new_zeros(
            (move.samples, *(interval.length for interval in inside)),
        )
        _add(result, move, move.shard, gradient[slices(inside)])
        for to, part in incoming:
            _add(result, move, to, part)
        return None, result


def _add(result: torch.Tensor, move: _Move, shard: int, part: torch.Tensor) -> None:
    # A spare share is a sample that another shard has too: its gradient must not count twice.
    if not move.ranges[shard].spare:
        result[move.rows(shard)] += part
