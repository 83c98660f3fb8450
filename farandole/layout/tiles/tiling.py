"""A stage on tiles: what comes in is cut or was cut before, what goes out stays cut.

    input ── cut ──▶ tiles ── layers … ──▶ tiles ──▶ the next stage
                                  ╰─ hand-off ─▶ samples ── layers … ──▶ samples, or the loss

Nothing in the model is replaced. Its layers are told apart by name only, for the log and for
errors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn

from farandole.errors import UserError
from farandole.layout.tiles.exchange import add_lanes
from farandole.layout.tiles.grid import Axes
from farandole.layout.tiles.handoff import all_samples, hand_off, share_of
from farandole.layout.tiles.lanes import Lanes
from farandole.layout.tiles.shards import Shards
from farandole.layout.tiles.table import functions
from farandole.layout.tiles.tile import Flow, Tile, Windowed, cut

_TILE = "farandole.tile"
"""The key of a tile in a message; beside it stands where it belongs."""


class _NeedsWholeError(Exception):
    """A loss cannot be computed tile by tile."""


class Tiling:
    """The tiles of one rank's stages. `names` are those of the layers, by module.

    `chosen`: the layer at which the tiles end; none: the first that cannot be tiled.
    `gathers`: behind the tiles the first lane alone goes on.
    """

    def __init__(
        self,
        lanes: Lanes,
        names: Mapping[nn.Module, str],
        *,
        chosen: str = "",
        gathers: bool = False,
    ) -> None:
        self.flow = Flow(lanes, functions(), self._whole)
        self.handed_off_at: str | None = None  # the first layer behind the tiles, once it is known
        self._chosen = chosen
        self._gathers = gathers
        self._samples = 0
        self._recording = True  # of each forward pass, until somebody has seen it
        self._in_loss = False
        self._path: list[str] = []
        for module, name in names.items():
            self._watch(module, name)

    def cut(self, value: Any) -> Any:
        """What the model is given, as a message of tiles. Tensors that are no images stay whole on
        every lane until the hand-off."""
        tiles = pytree.tree_map_only(
            torch.Tensor, lambda leaf: self._as_tile(leaf) if leaf.dim() else leaf, value
        )
        leaves = [leaf for leaf in pytree.tree_leaves(tiles) if isinstance(leaf, Tile)]
        spatial = self.flow.grid.spatial
        if spatial and all(len(leaf.axes) != spatial + 1 for leaf in leaves):
            raise UserError(
                f"{self.flow.grid} tiles are for samples with channels and an image of {spatial} "
                f"{'axis' if spatial == 1 else 'axes'}, and the inputs have shapes "
                f"{[tuple(leaf.shape) for leaf in leaves]}. Give the tiles a number for each axis."
            )
        return pytree.tree_map_only(Tile, _sent, tiles)

    def forward(self, run: Callable[[Any], Any], message: Any, samples: int) -> Any:
        """A stage that is not the last; returns a message."""
        with self._begun(samples):
            result = run(self._received(message))
            if self._gathers:
                result = self._handed_off(result)
            return pytree.tree_map_only(Tile, _sent, result)

    def loss(
        self,
        run: Callable[[Any], Any],
        message: Any,
        samples: int,
        function: Callable[[Any, Any], torch.Tensor],
        target: Any,
    ) -> torch.Tensor:
        """The last stage. All lanes' results add up to the loss."""
        with self._begun(samples):
            result = run(self._received(message))
            leaves = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
            if leaves and all(isinstance(leaf, Tile) for leaf in leaves):
                try:
                    return self._loss_of_tiles(function, result, target)
                except _NeedsWholeError:
                    self.handed_off_at = self.handed_off_at or "the loss"
            result = self._handed_off(result)
        return self._loss_of_samples(function, result, target)

    def predict(self, run: Callable[[Any], Any], message: Any, samples: int, last: bool) -> Any:
        """A forward pass alone: a message; of the last stage this lane's samples."""
        with self._begun(samples):
            result = run(self._received(message))
            if last or self._gathers:
                return self._handed_off(result)
            return pytree.tree_map_only(Tile, _sent, result)

    def end_recording(self) -> list[Windowed]:
        """The windowed layers of the last forward pass. Those that follow are not recorded."""
        found, self.flow.record = self.flow.record or [], None
        self._recording = False
        return found

    def repeatable(self, run: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """A part of a forward pass that may run again later, in the backward pass: then everything
        is as it was the first time."""
        samples, windows = self._samples, self.flow.windows
        rows = self.flow.handed_off_rows
        recorded = self.flow.record is not None
        first = True

        def again(value: Any) -> Any:
            nonlocal first
            if first:
                first = False
                return run(value)
            self._samples, self.flow.windows = samples, windows
            self.flow.handed_off_rows = rows
            # Recorded again if it was, so that it does the same; but the layers are known already.
            known, self.flow.record = self.flow.record, [] if recorded else None
            try:
                with self._shards():
                    return run(value)
            finally:
                self.flow.record = known

        return again

    def counted(self, value: torch.Tensor) -> list[tuple[slice, torch.Tensor]]:
        """What of a tensor is this rank's own, and of which channels it is."""
        lanes = self.flow.lanes
        if isinstance(value, Tile):
            pieces = zip(lanes.mine, value.own_pieces(), strict=True)
            return [(value.owned(lane)[0].slice, piece) for lane, piece in pieces]
        if lanes.all_here:
            return [(slice(None), value)]
        share = share_of(lanes.mine[0], lanes.grid.lanes, self._samples, self._gathers)
        return [] if share.spare else [(slice(None), value)]

    def mark(self, batch: Any, image: tuple[int, ...]) -> Any:
        """A batch of which this rank has read its tile alone, of images of this size."""
        (lane,) = self.flow.lanes.mine
        grid = self.flow.grid
        box = grid.owned(lane, image, tuple(range(1, grid.spatial + 1)))
        lengths = tuple(interval.length for interval in box)

        def tile(leaf: torch.Tensor) -> torch.Tensor:
            others = leaf.dim() - 1 - grid.spatial
            if others < 0 or tuple(leaf.shape[others + 1 :]) != lengths:
                return leaf
            sizes = (*leaf.shape[1 : others + 1], *image)
            axes: Axes = (*(None,) * others, *range(1, grid.spatial + 1))
            return Tile(self.flow, [leaf], sizes, axes)

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

    def box(self, image: tuple[int, ...]) -> tuple[slice, ...]:
        """This rank's tile of an image."""
        (lane,) = self.flow.lanes.mine
        grid = self.flow.grid
        owned = grid.owned(lane, image, tuple(range(1, grid.spatial + 1)))
        return tuple(interval.slice for interval in owned)

    # Messages

    def _as_tile(self, leaf: torch.Tensor) -> Tile:
        if isinstance(leaf, Tile):
            return Tile(self.flow, leaf.pieces, leaf.sizes, leaf.axes, leaf.margin)
        return cut(self.flow, leaf, self.axes_of(leaf))

    def axes_of(self, leaf: torch.Tensor) -> Axes:
        """An input's: images are divided, other tensors are not."""
        grid = self.flow.grid
        if grid.spatial == 0:
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

    def _received(self, message: Any) -> Any:
        def read(node: Any) -> Any:
            sizes, axes = (
                [None if number == "-" else int(number) for number in part.split(",") if number]
                for part in node["where"].split("/")
            )
            piece = node[_TILE]
            pieces = list(piece) if isinstance(piece, (list, tuple)) else [piece]
            return Tile(self.flow, pieces, sizes, tuple(axes))  # type: ignore[arg-type]

        def is_tile(node: Any) -> bool:
            return isinstance(node, dict) and _TILE in node

        return pytree.tree_map(
            lambda node: read(node) if is_tile(node) else node, message, is_leaf=is_tile
        )

    # Whole samples

    def _handed_off(self, result: Any) -> Any:
        return pytree.tree_map_only(
            Tile, lambda tile: hand_off(self.flow, tile, gathers=self._gathers), result
        )

    def _whole(
        self, flow: Flow, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Of a function that needs whole images."""
        if self._in_loss:
            raise _NeedsWholeError
        name = getattr(function, "__name__", str(function))
        if name == "__get__":  # of an attribute
            name = getattr(getattr(function, "__self__", None), "__name__", name)
        if self._chosen and self.handed_off_at is None:
            raise UserError(
                f"{flow.layer}: {name} needs the whole image, so it cannot be computed on tiles, "
                f"and handoff={self._chosen} comes later. Choose this layer, or leave handoff out."
            )
        if self._gathers:
            raise UserError(
                f"{flow.layer}: {name} needs the whole image, and belongs to a stage with a rank "
                "for every tile. Begin the next stage there with balance=… or cuts=…, or leave "
                "tiled out."
            )
        if self.handed_off_at is None:
            self.handed_off_at = f"{flow.layer} ({name})"
        args, kwargs = self._handed_off((args, kwargs))
        # Not the one around the forward pass: that is set aside while it has called this.
        with self._shards():
            return function(*args, **kwargs)

    # The loss

    def _loss_of_tiles(
        self, function: Callable[[Any, Any], torch.Tensor], result: Any, target: Any
    ) -> torch.Tensor:
        """On every lane the same: each counts by its share of the samples, which add up to one."""
        sizes = [leaf.sizes for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tile)]
        self._in_loss = True
        try:
            value = function(result, self._cut_like(target, sizes))
        finally:
            self._in_loss = False
        return value if self.flow.lanes.all_here else value * self._weight()

    def _cut_like(self, target: Any, sizes: list[tuple[int, ...]]) -> Any:
        grid = self.flow.grid
        images = {each[len(each) - grid.spatial :] for each in sizes}

        def tile(leaf: torch.Tensor) -> torch.Tensor:
            if isinstance(leaf, Tile):
                return self._as_tile(leaf)
            if not leaf.dim():
                return leaf
            others = leaf.dim() - 1 - grid.spatial
            axes: Axes = (None,) * (leaf.dim() - 1)
            if others >= 0 and tuple(leaf.shape[others + 1 :]) in images:
                front: Axes = (0,) if others == 1 else (None,) * others
                axes = (*front, *range(1, grid.spatial + 1))
            return cut(self.flow, leaf, axes)

        return pytree.tree_map_only(torch.Tensor, tile, target)

    def _loss_of_samples(
        self, function: Callable[[Any, Any], torch.Tensor], result: Any, target: Any
    ) -> torch.Tensor:
        """Every lane computes the loss of the whole batch, whatever it does with its samples."""
        if not self.flow.lanes.all_here:
            result = pytree.tree_map_only(torch.Tensor, self._all_samples, result)
        whole = pytree.tree_map_only(Tile, self._whole_target, target)
        value = function(result, whole)
        return value if self.flow.lanes.all_here else value * self._weight()

    def _all_samples(self, own: torch.Tensor) -> torch.Tensor:
        lanes = self.flow.lanes
        share = share_of(lanes.mine[0], lanes.grid.lanes, self._samples)
        if own.dim() and own.shape[0] == len(share.rows):
            return all_samples(self.flow, own, self._samples)
        # No samples: a number, say, which a lane has found from its own. It counts by their share,
        # and so does the lane's loss: what is left for its gradient is all of it.
        groups = [tuple(range(lanes.grid.lanes))] * lanes.grid.lanes
        part = own.detach() * self._weight()
        (total,) = add_lanes(lanes, lanes.next(), False, groups, [part])
        return own + (total - own.detach())

    def _whole_target(self, tile: Tile) -> torch.Tensor:
        own = hand_off(self.flow, self._as_tile(tile))
        return own if self.flow.lanes.all_here else all_samples(self.flow, own, self._samples)

    def _weight(self) -> float:
        lanes = self.flow.lanes
        share = share_of(lanes.mine[0], lanes.grid.lanes, self._samples)
        return 0.0 if share.spare else len(share.rows) / self._samples

    # Around a forward pass

    def _begun(self, samples: int) -> AbstractContextManager[object]:
        self.flow.begin()
        if self._recording:
            self.flow.record = []
        self._samples = samples
        self._path.clear()
        return self._shards()

    def _shards(self) -> AbstractContextManager[object]:
        return nullcontext() if self.flow.lanes.all_here else Shards(self.flow, self._samples)

    def _watch(self, module: nn.Module, name: str) -> None:
        def enter(module: nn.Module, args: tuple[Any, ...]) -> Any:
            self._path.append(name)
            self.flow.layer = name
            if name != self._chosen:
                return None
            if self.handed_off_at is None:
                self.handed_off_at = name
            return self._handed_off(args)

        def leave(module: nn.Module, args: Any, result: Any) -> None:
            if self._path:
                self._path.pop()
            self.flow.layer = self._path[-1] if self._path else "the model's own forward"

        module.register_forward_pre_hook(enter)
        module.register_forward_hook(leave)


def _sent(tile: Tile) -> dict[str, Any]:
    pieces = tile.own_pieces()
    sizes = ",".join(map(str, tile.sizes))
    axes = ",".join("-" if axis is None else str(axis) for axis in tile.axes)
    return {_TILE: pieces if len(pieces) > 1 else pieces[0], "where": f"{sizes}/{axes}"}
