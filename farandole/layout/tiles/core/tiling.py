"""A stage on tiles: what comes in is cut or was cut before, what goes out stays cut.

    input ── cut ──▶ tiles ── layers … ──▶ tiles ──▶ the next stage
                                  ╰─ hand-off ─▶ samples ── layers … ──▶ samples, or the loss

Nothing in the model is replaced. Its layers are told apart by name only, for the log and for
errors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn

from farandole.errors import FarandoleError, UserError
from farandole.layout.shards.batch_shard import BatchShard, sample_range
from farandole.layout.shards.table import batch_functions
from farandole.layout.tiles.core.custom_functions import at_work, watch_custom_functions
from farandole.layout.tiles.core.flow import Flow, Windowed
from farandole.layout.tiles.core.full_tensor import (
    all_rows_for_loss,
    compute_replicated,
    full_tensor,
)
from farandole.layout.tiles.core.handoff import gather_to_first, hand_off
from farandole.layout.tiles.core.inputs import as_tile, cut_like
from farandole.layout.tiles.core.layer_hooks import LayerHooks
from farandole.layout.tiles.core.messages import received, sent
from farandole.layout.tiles.core.refusals import function_name
from farandole.layout.tiles.core.shard_group import ShardGroup
from farandole.layout.tiles.core.side_effects import WholeGradientsOnly
from farandole.layout.tiles.core.snapshot import plain
from farandole.layout.tiles.core.table import functions
from farandole.layout.tiles.core.tile import Divided, Tile

_WATCHED = 2  # forward passes


class _NeedsWholeError(Exception):
    """A loss cannot be computed tile by tile."""


class Tiling:
    """The tiles of one rank's stages. `names` are those of the layers, by module.

    `chosen`: the layer at which the tiles end; none: the first that cannot be tiled.
    `gathers`: behind the tiles the first shard alone goes on.
    """

    def __init__(
        self,
        shards: ShardGroup,
        names: Mapping[nn.Module, str],
        *,
        chosen: str = "",
        gathers: bool = False,
    ) -> None:
        watch_custom_functions()
        self.flow = Flow(shards, functions(), self._otherwise, batch_functions())
        self.handed_off_at: str | None = None  # the first layer behind the tiles, once it is known
        self.replicated_at: list[str] = []  # what every shard computes all of, once it is known
        self._chosen = chosen
        self._gathers = gathers
        self._samples = 0
        self._passes = 0  # forward passes so far
        self._recording = True  # of each forward pass, until somebody has seen it
        self._in_loss = False
        self._layers = LayerHooks(self.flow, names, chosen, self._at_chosen)

    def cut(self, value: Any) -> Any:
        """What the model is given, as a message of tiles. Tensors that are no images stay whole on
        every shard until the hand-off."""
        tiles = pytree.tree_map_only(
            torch.Tensor, lambda leaf: as_tile(self.flow, leaf) if leaf.dim() else leaf, value
        )
        leaves = [leaf for leaf in pytree.tree_leaves(tiles) if isinstance(leaf, Tile)]
        spatial = self.flow.grid.spatial
        if spatial and all(len(leaf.axes) != spatial + 1 for leaf in leaves):
            raise UserError(
                f"{self.flow.grid} tiles are for samples with channels and an image of {spatial} "
                f"{'axis' if spatial == 1 else 'axes'}, and the inputs have shapes "
                f"{[tuple(leaf.shape) for leaf in leaves]}. Give the tiles a number for each axis."
            )
        return sent(tiles)

    def forward(self, run: Callable[[Any], Any], message: Any, samples: int) -> Any:
        """A stage that is not the last; returns a message."""
        self._begin(samples)
        result = self._run(run, message)
        return self._gathered_to_first(result) if self._gathers else sent(result)

    def loss(
        self,
        run: Callable[[Any], Any],
        message: Any,
        samples: int,
        function: Callable[[Any, Any], torch.Tensor],
        target: Any,
    ) -> torch.Tensor:
        """The last stage. All shards' results add up to the loss."""
        self._begin(samples)
        result = self._run(run, message)
        leaves = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Divided)]
        if leaves and all(isinstance(leaf, Tile) for leaf in leaves):
            try:
                return self._loss_of_tiles(function, result, target)
            except _NeedsWholeError:
                self.handed_off_at = self.handed_off_at or "the loss"
        return self._loss_of_samples(function, result, target)

    def predict(self, run: Callable[[Any], Any], message: Any, samples: int, last: bool) -> Any:
        """A forward pass alone: a message; of the last stage all samples, on every shard."""
        self._begin(samples)
        result = self._run(run, message)
        if last:
            return pytree.tree_map_only(torch.Tensor, _full, result)
        return self._gathered_to_first(result) if self._gathers else sent(result)

    def end_recording(self) -> list[Windowed]:
        """The windowed layers of the last forward pass. Those that follow are not recorded."""
        found, self.flow.record = self.flow.record or [], None
        self._recording = False
        return found

    def repeatable(self, run: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """A part of a forward pass that may run again later, in the backward pass: then everything
        is as it was the first time."""
        samples, windows = self._samples, self.flow.windows
        recorded = self.flow.record is not None
        first = True

        def again(value: Any) -> Any:
            nonlocal first
            if first:
                first = False
                return run(value)
            # Invariant: the second run makes the same exchanges as the first, in the same order, on
            # every shard. `windows` selects the margin of each layer, so it has to start from the
            # same count.
            self._samples, self.flow.windows = samples, windows
            # Recorded again if it was, so that it does the same; but the layers are known already.
            known, self.flow.record = self.flow.record, [] if recorded else None
            try:
                with at_work(self.flow):
                    return run(value)
            finally:
                self.flow.record = known

        return again

    def counted(self, value: torch.Tensor) -> list[tuple[slice, torch.Tensor]]:
        """What of a tensor is this rank's own, and of which channels it is."""
        shards = self.flow.shards
        if isinstance(value, Tile):
            pieces = zip(shards.mine, value.own_pieces(), strict=True)
            return [(value.owned(shard)[0].slice, piece) for shard, piece in pieces]
        if isinstance(value, BatchShard):
            return [] if value.spans.own_range.spare else [(slice(None), value.own)]
        return [(slice(None), plain(value))] if 0 in shards.mine else []  # every shard has the same

    # Whole samples

    def _handed_off(self, value: Any) -> Any:
        return pytree.tree_map_only(Tile, lambda tile: hand_off(self.flow, tile), value)

    def _gathered_to_first(self, result: Any) -> Any:
        """To the first shard, whole."""

        def one(leaf: torch.Tensor) -> torch.Tensor:
            return gather_to_first(self.flow, leaf) if isinstance(leaf, Tile) else _full(leaf)

        return pytree.tree_map_only(torch.Tensor, one, result)

    def _otherwise(
        self, flow: Flow, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Of a function that is not computed tile by tile, nor for every shard's samples.

        If it treats samples one by one, the tiles end here. If not, every shard computes it whole.
        """
        if self._in_loss:
            # All shards call the same functions of the loss, so all of them get here, or none.
            # Nothing has been exchanged for this function yet.
            raise _NeedsWholeError
        place = f"{flow.layer} ({function_name(function)})"
        handler = flow.batch_handlers.get(function)
        tiles = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tile)]
        result = NotImplemented
        if tiles and handler is not None and not flow.shards.all_here:
            result = handler(*self._by_samples(function, args, kwargs))
        ends = result is not NotImplemented
        if not ends:
            result = compute_replicated(flow, function, args, kwargs)
            # Where all shards are here, samples that are whole and no tile are their end as well.
            ends = flow.shards.all_here and handler is not None and _has_samples(result, tiles)
        if ends:
            self._check_may_end(function)
            self.handed_off_at = self.handed_off_at or place
        elif place not in self.replicated_at:
            self.replicated_at.append(place)
        return result

    def _by_samples(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What a handler of shares is called with."""
        args, kwargs = self._handed_off((args, kwargs))
        first = next(
            leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, BatchShard)
        )
        return first, function, args, kwargs

    def _check_may_end(self, function: Any) -> None:
        """Raises `UserError` if the tiles must not end here."""
        name = function_name(function)
        if self._chosen and self.handed_off_at is None:
            raise UserError(
                f"{self.flow.layer}: {name} needs the whole image, so it cannot be computed on "
                f"tiles, and handoff={self._chosen} comes later. Choose this layer, or leave "
                "handoff out."
            )
        if self._gathers:
            raise UserError(
                f"{self.flow.layer}: {name} needs the whole image, and belongs to a stage with a "
                "rank for every tile. Begin the next stage there with balance=… or cuts=…, or "
                "leave tiled out."
            )

    # The loss

    def _loss_of_tiles(
        self, function: Callable[[Any, Any], torch.Tensor], result: Any, target: Any
    ) -> torch.Tensor:
        """On every shard the same: each counts by its share of the samples, which add up to one."""
        sizes = [leaf.sizes for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tile)]
        self._in_loss = True
        try:
            value = function(result, cut_like(self.flow, target, sizes))
        finally:
            self._in_loss = False
        # The value is the same on all shards, and the shards' weights add up to one. So the sum of
        # what the shards return is the loss, and the sum of their gradients is its gradient.
        return value if self.flow.shards.all_here else value * _weight(self.flow, self._samples)

    def _loss_of_samples(
        self, function: Callable[[Any, Any], torch.Tensor], result: Any, target: Any
    ) -> torch.Tensor:
        """Every shard computes the loss of the whole batch, whatever it does with its samples."""
        flow = self.flow
        result = pytree.tree_map_only(torch.Tensor, self._for_loss, self._handed_off(result))
        whole_target = pytree.tree_map_only(
            Tile, lambda tile: full_tensor(as_tile(flow, tile)), target
        )
        value = function(result, whole_target)
        return value if self.flow.shards.all_here else value * _weight(self.flow, self._samples)

    def _for_loss(self, leaf: torch.Tensor) -> torch.Tensor:
        if isinstance(leaf, BatchShard) and leaf.samples == self._samples:
            return all_rows_for_loss(leaf)
        return _full(leaf)

    # Around a forward pass

    def _run(self, run: Callable[[Any], Any], message: Any) -> Any:
        """The first passes are watched more closely, which takes time."""
        self._passes += 1
        apart = self._passes <= _WATCHED and not self.flow.shards.all_here
        watched = WholeGradientsOnly(self.flow) if apart else nullcontext()
        try:
            with at_work(self.flow), watched:
                return run(received(self.flow, message))
        except (FarandoleError, MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            said = (str(error).splitlines() or [""])[0]
            raise UserError(
                f"{self.flow.layer}: {type(error).__name__}: {said} This layer computes with a "
                "tensor that is divided among workers. If the model runs without a layout, end the "
                "tiles before this layer with handoff=…, or train this model without tiles."
            ) from error

    def _begin(self, samples: int) -> None:
        self.flow.begin()
        if self._recording:
            self.flow.record = []
        self._samples = samples
        self._layers.begin()

    def _at_chosen(self, args: tuple[Any, ...]) -> Any:
        """The tiles end at the chosen layer; returns what it is given instead."""
        if self.handed_off_at is None:
            self.handed_off_at = self._chosen
        return self._handed_off(args)


def _weight(flow: Flow, samples: int) -> float:
    """What this shard's loss counts; over all shards this adds up to one."""
    own = sample_range(flow.shards.mine[0], flow.grid.shards, samples)
    # A spare shard repeats a sample that another one counts.
    return 0.0 if own.spare else len(own.rows) / samples


def _full(leaf: torch.Tensor) -> torch.Tensor:
    return full_tensor(leaf) if isinstance(leaf, Divided) else plain(leaf)


def _has_samples(value: Any, tiles: Sequence[Tile]) -> bool:
    return any(
        isinstance(leaf, torch.Tensor)
        and not isinstance(leaf, Tile)
        and leaf.dim() > 0
        and any(leaf.shape[0] == tile.rows for tile in tiles)
        for leaf in pytree.tree_leaves(value)
    )
