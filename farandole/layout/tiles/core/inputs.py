"""How whole inputs and targets become tiles, and what of an image a dataset reads for a tile."""

from __future__ import annotations

from typing import Any

import torch
import torch.utils._pytree as pytree

from farandole.errors import UserError
from farandole.layout.tiles.core.flow import Flow
from farandole.layout.tiles.core.grid import Axes
from farandole.layout.tiles.core.tile import Tile, cut


def as_tile(flow: Flow, leaf: torch.Tensor) -> Tile:
    if isinstance(leaf, Tile):
        return Tile(flow, leaf.pieces, leaf.sizes, leaf.axes, leaf.margin)
    return cut(flow, leaf, axes_of(flow, leaf))


def axes_of(flow: Flow, leaf: torch.Tensor) -> Axes:
    """An input's: images are divided, other tensors are not."""
    grid = flow.grid
    if grid.spatial == 0:
        # Without tiles, only the channels are divided, whatever else the tensor has.
        return (0, *(None,) * (leaf.dim() - 2)) if leaf.dim() > 1 else ()
    if leaf.dim() != grid.spatial + 2:
        return (None,) * (leaf.dim() - 1)
    for size, parts in zip(leaf.shape[2:], grid.parts[1:], strict=True):
        if size < parts:
            raise UserError(
                f"an image of {tuple(leaf.shape[2:])} cannot be cut into {grid} tiles: an axis "
                f"of {size} has no {parts} parts. Take fewer tiles, or larger images."
            )
    return grid.image_axes


def cut_like(flow: Flow, target: Any, sizes: list[tuple[int, ...]]) -> Any:
    """Targets in the way of outputs with these sizes: what has the size of their images is cut."""
    grid = flow.grid
    images = {each[len(each) - grid.spatial :] for each in sizes}

    def tile(leaf: torch.Tensor) -> torch.Tensor:
        if isinstance(leaf, Tile):
            return as_tile(flow, leaf)
        if not leaf.dim():
            return leaf
        others = leaf.dim() - 1 - grid.spatial
        axes: Axes = (None,) * (leaf.dim() - 1)
        if others >= 0 and tuple(leaf.shape[others + 1 :]) in images:
            # One axis before the image is taken for channels. Targets with several have them whole
            # on every shard, which is exact and divides less.
            front: Axes = (0,) if others == 1 else (None,) * others
            axes = (*front, *range(1, grid.spatial + 1))
        return cut(flow, leaf, axes)

    return pytree.tree_map_only(torch.Tensor, tile, target)


def mark_tile(flow: Flow, batch: Any, image: tuple[int, ...]) -> Any:
    """A batch of which this rank has read its tile alone, of images of this size."""
    (shard,) = flow.shards.mine
    grid = flow.grid
    box = grid.owned(shard, image, tuple(range(1, grid.spatial + 1)))
    lengths = tuple(interval.length for interval in box)

    def tile(leaf: torch.Tensor) -> torch.Tensor:
        others = leaf.dim() - 1 - grid.spatial
        if others < 0 or tuple(leaf.shape[others + 1 :]) != lengths:
            return leaf
        sizes = (*leaf.shape[1 : others + 1], *image)
        axes: Axes = (*(None,) * others, *range(1, grid.spatial + 1))
        return Tile(flow, [leaf], sizes, axes)

    marked = pytree.tree_map_only(torch.Tensor, tile, batch)
    leaves = pytree.tree_leaves(marked)
    if not any(isinstance(leaf, Tile) for leaf in leaves):
        shapes = [tuple(leaf.shape) for leaf in leaves if isinstance(leaf, torch.Tensor)]
        raise UserError(
            f"the dataset was asked for a tile of {lengths} of its images, of {image}, and "
            f"gave a batch with the shapes {shapes}. Let tile(index, box) return "
            "image[..., *box]."
        )
    return marked


def tile_box(flow: Flow, image: tuple[int, ...]) -> tuple[slice, ...]:
    """This rank's tile of an image."""
    (shard,) = flow.shards.mine
    grid = flow.grid
    owned = grid.owned(shard, image, tuple(range(1, grid.spatial + 1)))
    return tuple(interval.slice for interval in owned)
