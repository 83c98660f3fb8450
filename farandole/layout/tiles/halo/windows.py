"""Layers whose outputs look at windows of the image: what all of them have in common."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from farandole.layout.tiles.core.flow import Flow, Windowed
from farandole.layout.tiles.core.grid import CHANNELS, Axes, Box, Grid, Margin, Needs, is_empty
from farandole.layout.tiles.core.intervals import Interval
from farandole.layout.tiles.core.tile import Tile, empty_result


class WindowPart(NamedTuple):
    """One shard's share of a layer: what it needs, put together, and what it must make of it."""

    shard: int
    source: torch.Tensor
    needed: Box  # where the source lies in the input; may go beyond it
    wanted: Box  # the part of the output


class OutputParts(NamedTuple):
    """What every shard computes of a layer's output, and needs of its input for it."""

    margin: Margin
    wanted: list[Box]
    needed: list[Box]


def numbers(value: Any, count: int) -> tuple[int, ...]:
    """An argument that is one number or one for each axis."""
    if isinstance(value, int):
        return (value,) * count
    given = tuple(int(each) for each in value)
    return given * count if len(given) == 1 else given


def are_numbers(value: Any, count: int, least: int) -> bool:
    """Whether `numbers` can read an argument, and all of them are at least so large."""
    if type(value) is int:
        return value >= least
    if not isinstance(value, (tuple, list)) or len(value) not in (1, count):
        return False
    return all(type(each) is int and each >= least for each in value)


def windowed(
    flow: Flow,
    x: Tile,
    sizes: Sequence[int],
    needs: Callable[[Box], Box],
    compute: Callable[[WindowPart], torch.Tensor],
    *,
    axes: Axes | None = None,
    fill: float = 0.0,
) -> Tile:
    """A layer with outputs of `sizes`: `needs` says what a part of the output needs of the input,
    and `compute` makes that part of it. Beyond the image there is `fill`."""
    axes = x.axes if axes is None else axes
    margin, wanted, needed = next_output_parts(flow, x, sizes, needs, axes)
    sources = x.collect([as_needs(box) for box in needed], fill)
    began = now(flow, sources[0])
    pieces = []
    for shard, source in zip(flow.shards.mine, sources, strict=True):
        box = wanted[shard]
        if is_empty(box):
            shape = (source.shape[0], *(interval.length for interval in box))
            pieces.append(empty_result(source, shape))
        else:
            pieces.append(compute(WindowPart(shard, source, needed[shard], box)))
    result = Tile(flow, pieces, sizes, axes, margin)
    record(flow, x, result, needs, began)
    return result


def record(flow: Flow, x: Tile, result: Tile, needs: Callable[[Box], Box], began: float) -> None:
    """While layers are recorded, notes the one that made `result` of `x` since `began`."""
    if flow.record is None:
        return
    number = len(flow.record)
    met = Windowed(
        flow.layer,
        result.sizes,
        result.axes,
        x.sizes,
        x.axes,
        needs,
        x.sources,
        position_bytes=x.rows * x.pieces[0].element_size(),
        seconds=(now(flow, result.pieces[0]) - began) / len(result.pieces),
    )
    # A negative number stands for a reader. A later layer finds its halo in two ways: the layer
    # that made its input has computed that far, or an earlier reader has made the same tensor wide.
    x.sources |= {~number}
    result.sources = frozenset([number])
    flow.record.append(met)


def next_output_parts(
    flow: Flow, x: Tile, sizes: Sequence[int], needs: Callable[[Box], Box], axes: Axes
) -> OutputParts:
    """Of the windowed layer that is computed now."""
    margin = flow.next_margin(len(axes))
    wanted = [flow.grid.held(shard, sizes, axes, margin) for shard in range(flow.grid.shards)]
    # `needs` of nothing would be an interval of the kernel's size somewhere in the image.
    needed = [_none(x) if is_empty(box) else needs(box) for box in wanted]
    if any(before or after for before, after in margin):
        # The input stays wide, for whoever else reads it: a branch, or what is added to it.
        wide = reach(flow.grid, x.sizes, x.axes, needed)
        if wide is not None:
            x.widen(wide)
    return OutputParts(margin, wanted, needed)


def reach(grid: Grid, sizes: Sequence[int], axes: Axes, needed: Sequence[Box]) -> Margin | None:
    """The margin with which every shard has what it needs of a tensor: `needed`, by shard.

    None if no margin is enough: a shard needs others' channels, or owns nothing to begin with.
    """
    found = [(0, 0)] * len(axes)
    for shard, box in enumerate(needed):
        inside = [run.meets(Interval(0, size)) for run, size in zip(box, sizes, strict=True)]
        if is_empty(tuple(inside)):
            continue
        owned = grid.owned(shard, sizes, axes)
        if is_empty(owned):
            return None
        for at, (mine, run) in enumerate(zip(owned, inside, strict=True)):
            if axes[at] == CHANNELS and not mine.covers(run):
                return None
            # One margin for all shards, the widest that any of them needs. So each shard knows what
            # the others hold, without asking.
            before, after = found[at]
            found[at] = max(before, mine.start - run.start), max(after, run.stop - mine.stop)
    return tuple(found)


def now(flow: Flow, tensor: torch.Tensor) -> float:
    """The time; while layers are recorded, when the device is done with them."""
    if flow.record is not None and tensor.device.type != "cpu":
        torch.accelerator.synchronize(tensor.device)
    return time.perf_counter()


def as_needs(box: Box) -> Needs:
    return tuple((interval,) for interval in box)


def _none(x: Tile) -> Box:
    return (Interval(0, 0),) * len(x.axes)
