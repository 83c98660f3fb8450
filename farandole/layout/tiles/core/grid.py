"""Who owns what: shards on a grid over the channels and the axes of an image. Pure, without torch.

A *shard* computes one tile through all layers. The shards of a 2×2 grid are numbered by rows:

    shard 0 │ shard 1        coordinates (channel, row, column):   (0, 0, 0)  (0, 0, 1)
    ───────┼───────
    shard 2 │ shard 3                                              (0, 1, 0)  (0, 1, 1)

A tensor says for each of its axes (all but the first, the batch) along which axis of the grid it is
divided, or None where every shard has all of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from itertools import product
from typing import NamedTuple

from farandole.layout.tiles.core.intervals import Interval, Runs, owned_interval, total

Axes = tuple[int | None, ...]
"""For each axis of a tensor but the first: the axis of the grid that divides it."""
Box = tuple[Interval, ...]
"""A part of a tensor: an interval of each axis but the first."""
Margin = tuple[tuple[int, int], ...]
"""How far beyond what it owns a shard has a tensor: before and after, for each axis."""

CHANNELS = 0
"""The grid's axis of channels; those of the image follow."""


class Grid:
    """Parts along the channels and along each axis of the image."""

    def __init__(self, tiles: Sequence[int], channels: int = 1) -> None:
        self.parts = (channels, *tiles)
        self.shards = math.prod(self.parts)

    @property
    def spatial(self) -> int:
        """How many axes an image has."""
        return len(self.parts) - 1

    @cached_property
    def coordinates(self) -> list[tuple[int, ...]]:
        """Of every shard."""
        return list(product(*(range(parts) for parts in self.parts)))

    @property
    def image_axes(self) -> Axes:
        """Of a tensor with channels and an image."""
        return tuple(range(len(self.parts)))

    def is_divided(self, axis: int | None) -> bool:
        return axis is not None and self.parts[axis] > 1

    def owned(self, shard: int, sizes: Sequence[int], axes: Axes) -> Box:
        """What a shard owns of a tensor."""
        # Invariant: along the axes that divide a tensor, the shards' boxes cover it without
        # overlap. A sum over owned parts therefore counts every element once, and every element has
        # one owner that collects its gradient.
        at = self.coordinates[shard]
        return tuple(
            Interval(0, size) if axis is None else owned_interval(at[axis], self.parts[axis], size)
            for size, axis in zip(sizes, axes, strict=True)
        )

    def held(self, shard: int, sizes: Sequence[int], axes: Axes, margin: Margin) -> Box:
        """What a shard has of a tensor: what it owns, and a margin inside the image."""
        box = self.owned(shard, sizes, axes)
        # A margin around nothing would be a part that somebody else owns, and there would be no own
        # part to place it against.
        if is_empty(box):
            return box
        return tuple(
            interval.grown(before, after, size)
            for interval, (before, after), size in zip(box, margin, sizes, strict=True)
        )

    def beside(self, shard: int, summed: Sequence[int | None]) -> tuple[int, ...]:
        """The shards that differ from this one only along some axes of the grid; itself too."""
        here = self.coordinates[shard]
        return tuple(
            other
            for other, there in enumerate(self.coordinates)
            if all(axis in summed or here[axis] == there[axis] for axis in range(len(self.parts)))
        )

    def groups_along(self, axes: Sequence[int | None]) -> list[tuple[int, ...]]:
        """For every shard, the shards that a sum along these axes of the grid adds up."""
        # Only shards that differ along a summed axis have different parts of a sum. Shards that
        # differ elsewhere hold copies or other elements: adding those would count elements twice
        # or mix them up.
        summed = [axis for axis in axes if self.is_divided(axis)]
        return [self.beside(shard, summed) for shard in range(self.shards)]

    def __str__(self) -> str:
        image = "x".join(map(str, self.parts[1:]))
        return image if self.parts[0] == 1 else f"{image}, channels in {self.parts[0]}"


def is_empty(box: Box) -> bool:
    return any(not interval.length for interval in box)


def widest(one: Margin, other: Margin) -> Margin:
    """The margin that has both."""
    return tuple(
        (max(before, more_before), max(after, more_after))
        for (before, after), (more_before, more_after) in zip(one, other, strict=True)
    )


def relative(box: Box, origin: Box) -> Box:
    """A box as seen from the corner of another."""
    return tuple(interval.moved(-from_.start) for interval, from_ in zip(box, origin, strict=True))


class Copy(NamedTuple):
    """A part of what `source` owns goes into what `to` needs: where it is here and there."""

    source: int
    to: int
    taken: Box  # from the corner of what the source owns
    put: Box  # from the corner of what is put together


Needs = tuple[Runs, ...]
"""What a shard needs of a tensor: runs of each axis. They may go beyond the tensor."""


def copies(grid: Grid, sizes: Sequence[int], axes: Axes, needs: Sequence[Needs]) -> list[Copy]:
    """All that must be copied so that every shard has what it needs, from who owns it.

    In an order that all shards find alike.
    """
    # Every shard computes this list for all shards, from sizes alone. So a sender knows what to
    # send without being asked. Invariant: each needed position inside the tensor comes from exactly
    # one owner, and its gradient goes back to that owner alone.
    found = []
    for to, wanted in enumerate(needs):
        for source in range(grid.shards):
            if not _is_asked(grid, source, to, axes):
                continue
            owned = grid.owned(source, sizes, axes)
            for run in product(*(list(_placed(axis)) for axis in wanted)):
                box = tuple(
                    mine.meets(interval) for mine, (interval, _) in zip(owned, run, strict=True)
                )
                if is_empty(box):
                    continue
                put = tuple(
                    interval.moved(offset - whole.start)
                    for interval, (whole, offset) in zip(box, run, strict=True)
                )
                found.append(Copy(source, to, relative(box, owned), put))
    return found


def needed_shape(wanted: Needs) -> tuple[int, ...]:
    return tuple(total(axis) for axis in wanted)


def _is_asked(grid: Grid, source: int, to: int, axes: Axes) -> bool:
    """Along axes that do not divide a tensor many shards have the same part: the nearest is asked,
    which is the one with the same coordinates there."""
    here, there = grid.coordinates[source], grid.coordinates[to]
    return all(axis in axes or here[axis] == there[axis] for axis in range(len(grid.parts)))


def _placed(axis: Runs) -> list[tuple[Interval, int]]:
    """Each run, and where it begins when all are put one after the other."""
    placed, offset = [], 0
    for run in axis:
        placed.append((run, offset))
        offset += run.length
    return placed
