"""Divided tensors in messages between stages: what this shard has, and where it belongs."""

from __future__ import annotations

from typing import Any

import torch
import torch.utils._pytree as pytree

from farandole.layout.shards.batch_shard import BatchShard
from farandole.layout.tiles.core.flow import Flow
from farandole.layout.tiles.core.snapshot import plain
from farandole.layout.tiles.core.tile import Divided, Tile

_TILE, _ROWS = "farandole.tile", "farandole.rows"
"""The keys of a tile and of a share in a message; beside it stands where it belongs."""


def sent(value: Any) -> Any:
    """As a message: what is divided as what this shard has of it."""

    def one(leaf: torch.Tensor) -> Any:
        if isinstance(leaf, Divided):
            leaf.flow.check()
        if isinstance(leaf, BatchShard):
            return {_ROWS: leaf.own, "where": f"{leaf.samples}/{leaf.factor}"}
        if not isinstance(leaf, Tile):
            return plain(leaf)
        # Without the margin: the next stage asks for what it needs itself, and its layers may need
        # another margin or none.
        pieces = leaf.own_pieces()
        sizes = ",".join(map(str, leaf.sizes))
        axes = ",".join("-" if axis is None else str(axis) for axis in leaf.axes)
        return {_TILE: pieces if len(pieces) > 1 else pieces[0], "where": f"{sizes}/{axes}"}

    return pytree.tree_map_only(torch.Tensor, one, value)


def received(flow: Flow, message: Any) -> Any:
    """The opposite of `sent`, on the rank that has the same shard of the next stage."""

    def read(node: Any) -> Any:
        if not _is_divided(node):
            return node
        first, second = (
            [None if number == "-" else int(number) for number in part.split(",") if number]
            for part in node["where"].split("/")
        )
        if _ROWS in node:
            return BatchShard(flow, node[_ROWS], first[0], second[0])  # type: ignore[arg-type]
        piece = node[_TILE]
        pieces = list(piece) if isinstance(piece, (list, tuple)) else [piece]
        return Tile(flow, pieces, first, tuple(second))  # type: ignore[arg-type]

    return pytree.tree_map(read, message, is_leaf=_is_divided)


def _is_divided(node: Any) -> bool:
    return isinstance(node, dict) and (_TILE in node or _ROWS in node)
