"""Tiles get what they need from whoever owns it, and send back its gradient.

    forward    owner ── a part of its tile ──▶ who needs it      (halos, among others)
    backward   owner ◀── the gradient of that part, to be added

Both are the same list of copies, read in two directions. Sums over lanes are here too: their
gradient is the sum of the gradients, because every lane goes on with the sum in its own way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from farandole.layout.tiles.core.grid import Box, Copy, Needs, needed_shape
from farandole.layout.tiles.core.lanes import Lanes


class ExchangeTask(NamedTuple):
    """An exchange: of which lanes, what is copied, and where owned parts lie in what lanes hold."""

    lanes: Lanes
    number: int
    copies: Sequence[Copy]
    shapes: Sequence[tuple[int, ...]]  # of what each lane here puts together
    owned: Sequence[Box]  # for each lane here, from the corner of its piece
    fill: float  # outside of the image


def gather(
    lanes: Lanes,
    copies: Sequence[Copy],
    needs: Sequence[Needs],
    pieces: Sequence[torch.Tensor],
    owned: Sequence[Box],
    fill: float,
) -> list[torch.Tensor]:
    """What every lane here needs, put together; differentiable.

    `copies` and `needs` are those of all lanes, `pieces` and `owned` those of the lanes here.
    """
    shapes = [needed_shape(needs[lane]) for lane in lanes.mine]
    job = ExchangeTask(lanes, lanes.next(), copies, shapes, owned, fill)
    result = _Gather.apply(job, *pieces)
    return [result] if isinstance(result, torch.Tensor) else list(result)


def slices(box: Box) -> tuple[slice, ...]:
    """As an index of a tensor with its batch in front."""
    return (slice(None), *(interval.slice for interval in box))


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, job: ExchangeTask, *pieces: torch.Tensor) -> Any:
        ctx.job = job
        ctx.shapes = [piece.shape for piece in pieces]
        mine = job.lanes.mine
        sources = {
            lane: piece[slices(owned)]
            for lane, piece, owned in zip(mine, pieces, job.owned, strict=True)
        }
        post_parts(
            job.lanes,
            job.number,
            job.copies,
            lambda copy: sources[copy.source][slices(copy.taken)],
        )
        results = []
        for lane, piece, shape in zip(mine, pieces, job.shapes, strict=True):
            result = piece.new_empty((piece.shape[0], *shape))
            if _filled(job, lane) < result[0].numel() if result.shape[0] else False:
                result.fill_(job.fill)
            for copy in job.copies:
                if copy.to == lane and copy.source in sources:
                    result[slices(copy.put)] = sources[copy.source][slices(copy.taken)]
            results.append(result)
        for copy, part in taken_parts(job.lanes, job.number, job.copies):
            results[mine.index(copy.to)][slices(copy.put)] = part
        return tuple(results) if len(results) > 1 else results[0]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        job: ExchangeTask = ctx.job
        mine = job.lanes.mine
        post_parts(
            job.lanes,
            job.number,
            job.copies,
            lambda copy: gradients[mine.index(copy.to)][slices(copy.put)],
            back=True,
        )
        results = []
        for lane, shape, owned in zip(mine, ctx.shapes, job.owned, strict=True):
            result = gradients[0].new_zeros(shape)
            inside = result[slices(owned)]
            for copy in job.copies:
                if copy.source == lane and copy.to in mine:
                    inside[slices(copy.taken)] += gradients[mine.index(copy.to)][slices(copy.put)]
            results.append(result)
        for copy, part in taken_parts(job.lanes, job.number, job.copies, back=True):
            at = mine.index(copy.source)
            results[at][slices(job.owned[at])][slices(copy.taken)] += part
        return None, *results


def post_parts(
    lanes: Lanes,
    number: int,
    copies: Sequence[Copy],
    part_of: Callable[[Copy], torch.Tensor],
    *,
    back: bool = False,
) -> None:
    """Sends the lanes elsewhere their parts, one message each. `back`: gradients, to the owners."""
    for lane, group in _with_others(lanes, copies, leaving=not back):
        # A copy in any case: what is posted may still be on its way when its source is changed.
        parts = [part_of(copy).clone(memory_format=torch.contiguous_format) for copy in group]
        lanes.post(lane, number, back, parts)


def expect_parts(lanes: Lanes, copies: Sequence[Copy], *, back: bool = False) -> None:
    """Lets what others post for the lanes here come while these compute."""
    for lane, _ in _with_others(lanes, copies, leaving=back):
        lanes.expect(lane)


def taken_parts(
    lanes: Lanes, number: int, copies: Sequence[Copy], *, back: bool = False
) -> Iterator[tuple[Copy, torch.Tensor]]:
    """What others have posted for the lanes here, each with the copy that it is part of."""
    for lane, group in _with_others(lanes, copies, leaving=back):
        yield from zip(group, lanes.take(lane, number, back), strict=True)


def _with_others(
    lanes: Lanes, copies: Sequence[Copy], *, leaving: bool
) -> list[tuple[int, list[Copy]]]:
    """The copies that leave the lanes here, or come to them, by the lane elsewhere."""
    found: dict[int, list[Copy]] = {}
    for copy in copies:
        here, there = (copy.source, copy.to) if leaving else (copy.to, copy.source)
        if here in lanes.mine and there not in lanes.mine:
            found.setdefault(there, []).append(copy)
    return sorted(found.items())


def _filled(job: ExchangeTask, lane: int) -> int:
    """How many positions of what a lane needs are copied; the others are outside of the image."""
    positions = 0
    for copy in job.copies:
        if copy.to == lane:
            volume = 1
            for interval in copy.put:
                volume *= interval.length
            positions += volume
    return positions


def sum_lanes(
    lanes: Lanes, groups: Sequence[tuple[int, ...]], values: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """For every lane here, the sum over its group of lanes; differentiable.

    `groups[lane]` are the lanes that are added up for a lane, in order.
    """
    if all(len(group) == 1 for group in groups):
        return list(values)
    result = _Sum.apply(lanes, lanes.next(), groups, *values)
    return [result] if isinstance(result, torch.Tensor) else list(result)


def tell_lanes(
    lanes: Lanes,
    number: int,
    back: bool,
    groups: Sequence[tuple[int, ...]],
    values: Sequence[torch.Tensor],
) -> list[list[torch.Tensor]]:
    """For every lane here, the values of all lanes of its group, in their order."""
    mine = lanes.mine
    known = dict(zip(mine, values, strict=True))
    wanted = {other for lane in mine for other in groups[lane]} - set(mine)
    for lane in mine:
        for other in groups[lane]:
            if other not in mine:
                lanes.post(other, number, back, [known[lane]])
    for other in sorted(wanted):
        (known[other],) = lanes.take(other, number, back)
    return [[known[other] for other in groups[lane]] for lane in mine]


def add_lanes(
    lanes: Lanes,
    number: int,
    back: bool,
    groups: Sequence[tuple[int, ...]],
    values: Sequence[torch.Tensor],
) -> list[torch.Tensor]:
    """As `sum_lanes`, without autograd. Always added in the order of the lanes, so that all that
    hold the same sum hold the same bits."""
    results = []
    for first, *rest in tell_lanes(lanes, number, back, groups, values):
        result = first.clone()
        for other in rest:
            result += other
        results.append(result)
    return results


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        lanes: Lanes,
        number: int,
        groups: Sequence[tuple[int, ...]],
        *values: torch.Tensor,
    ) -> Any:
        ctx.lanes, ctx.number, ctx.groups = lanes, number, groups
        results = add_lanes(lanes, number, False, groups, values)
        return tuple(results) if len(results) > 1 else results[0]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return None, None, None, *add_lanes(ctx.lanes, ctx.number, True, ctx.groups, gradients)
