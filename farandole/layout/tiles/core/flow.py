"""What the tiles of one model have in common: shards, handlers, and where the forward is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from farandole.layout.tiles.core.grid import (
    Axes,
    Box,
    Copy,
    Grid,
    Margin,
    Needs,
    copies,
)
from farandole.layout.tiles.core.shard_group import ShardGroup

Handler = Callable[..., Any]
"""Computes a function of torch tile by tile: called with the flow and the function's arguments."""


class Windowed(NamedTuple):
    """A layer whose outputs look at windows, as it was met in a forward pass."""

    layer: str
    sizes: tuple[int, ...]  # of its output
    axes: Axes
    input_sizes: tuple[int, ...]
    input_axes: Axes
    needs: Callable[[Box], Box]  # what a part of its output needs of its input
    sources: frozenset[int]  # where its input comes from, see `Tile`
    position_bytes: int  # that all samples together have at one position of its input
    seconds: float  # that a shard took to compute what it owns


class Flow:
    """What the tiles of one model have in common: the shards, the table, and where they are."""

    def __init__(
        self,
        shards: ShardGroup,
        handlers: Mapping[Any, Handler],
        otherwise: Handler,
        batch_handlers: Mapping[Any, Handler] = MappingProxyType({}),
    ) -> None:
        self.shards = shards
        self.handlers = handlers
        self.batch_handlers = batch_handlers  # of functions that treat samples one by one
        self.otherwise = otherwise
        """Called with the flow, a function that is in no table, its arguments and their names."""
        self.layer = "the input"  # where the model is, for whoever must name it
        self.margins: Sequence[Margin] = ()
        """How far beyond what it owns each windowed layer computes, in the order they are called;
        none: no further. What it computes beyond, the layers after it need not ask for."""
        self.windows = 0  # windowed layers since the forward began
        self.overlap = True  # whether a convolution computes while its halo is on the way
        self.record: list[Windowed] | None = None  # while it is found out which layers there are
        self.plans: dict[Any, Any] = {}
        """What layers have worked out about who computes what, by all that it follows from."""
        self._copies: dict[Any, list[Copy]] = {}

    @property
    def grid(self) -> Grid:
        return self.shards.grid

    def check(self) -> None:
        """What has another flow instead must not be used any more, see `Invalidated`."""

    def begin(self) -> None:
        """A forward pass begins."""
        self.windows = 0

    def next_margin(self, axes: int) -> Margin:
        """Of the windowed layer that is computed now."""
        # By number, not by name: one layer may be called several times in a forward. Invariant: all
        # shards call windowed layers in the same order, so the number means the same layer on all
        # of them.
        at, self.windows = self.windows, self.windows + 1
        return self.margins[at] if at < len(self.margins) else no_margin(axes)

    def copies(self, sizes: tuple[int, ...], axes: Axes, needs: tuple[Needs, ...]) -> list[Copy]:
        key = sizes, axes, needs
        if key not in self._copies:
            # Computing the list takes longer than many exchanges, and a model asks for the same
            # ones in every step.
            self._copies[key] = copies(self.grid, sizes, axes, needs)
        return self._copies[key]


def no_margin(axes: int) -> Margin:
    return ((0, 0),) * axes
