"""Tiles get what they need from whoever owns it, and send back its gradient.

    forward    owner ── a part of its tile ──▶ who needs it      (halos, among others)
    backward   owner ◀── the gradient of that part, to be added

Both are the same list of copies, read in two directions. Sums over shards are here too: their
gradient is the sum of the gradients, because every shard goes on with the sum in its own way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from farandole.layout.tiles.core.grid import Box, Copy, Needs, needed_shape
from farandole.layout.tiles.core.shard_group import ShardGroup


class ExchangeTask(NamedTuple):
    """An exchange: of which shards, what is copied, and where owned parts lie in what shards
    hold."""

    shards: ShardGroup
    number: int
    copies: Sequence[Copy]
    shapes: Sequence[tuple[int, ...]]  # of what each shard here puts together
    owned: Sequence[Box]  # for each shard here, from the corner of its piece
    fill: float  # outside of the image


def gather(
    shards: ShardGroup,
    copies: Sequence[Copy],
    needs: Sequence[Needs],
    pieces: Sequence[torch.Tensor],
    owned: Sequence[Box],
    fill: float,
) -> list[torch.Tensor]:
    """What every shard here needs, put together; differentiable.

    `copies` and `needs` are those of all shards, `pieces` and `owned` those of the shards here.
    """
    shapes = [needed_shape(needs[shard]) for shard in shards.mine]
    job = ExchangeTask(shards, shards.next(), copies, shapes, owned, fill)
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
        mine = job.shards.mine
        sources = {
            shard: piece[slices(owned)]
            for shard, piece, owned in zip(mine, pieces, job.owned, strict=True)
        }
        post_parts(
            job.shards,
            job.number,
            job.copies,
            lambda copy: sources[copy.source][slices(copy.taken)],
        )
        results = []
        for shard, piece, shape in zip(mine, pieces, job.shapes, strict=True):
            result = piece.new_empty((piece.shape[0], *shape))
            # Copies do not overlap, so their volumes add up. If they fill the result, nothing of it
            # lies outside the image, and filling it first would be wasted work.
            if _filled(job, shard) < result[0].numel() if result.shape[0] else False:
                result.fill_(job.fill)
            for copy in job.copies:
                if copy.to == shard and copy.source in sources:
                    result[slices(copy.put)] = sources[copy.source][slices(copy.taken)]
            results.append(result)
        # Local copies come first, while messages of others are still on their way.
        for copy, part in taken_parts(job.shards, job.number, job.copies):
            results[mine.index(copy.to)][slices(copy.put)] = part
        return tuple(results) if len(results) > 1 else results[0]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        job: ExchangeTask = ctx.job
        mine = job.shards.mine
        post_parts(
            job.shards,
            job.number,
            job.copies,
            lambda copy: gradients[mine.index(copy.to)][slices(copy.put)],
            back=True,
        )
        results = []
        for shard, shape, owned in zip(mine, ctx.shapes, job.owned, strict=True):
            result = gradients[0].new_zeros(shape)
            # The backward is the forward turned round: where a value was copied to several shards,
            # their gradients of it add up at its owner. Nothing was taken from beyond
            # `owned`, so the gradient is zero there.
            inside = result[slices(owned)]
            for copy in job.copies:
                if copy.source == shard and copy.to in mine:
                    inside[slices(copy.taken)] += gradients[mine.index(copy.to)][slices(copy.put)]
            results.append(result)
        for copy, part in taken_parts(job.shards, job.number, job.copies, back=True):
            at = mine.index(copy.source)
            results[at][slices(job.owned[at])][slices(copy.taken)] += part
        return None, *results


def post_parts(
    shards: ShardGroup,
    number: int,
    copies: Sequence[Copy],
    part_of: Callable[[Copy], torch.Tensor],
    *,
    back: bool = False,
) -> None:
    """Sends the shards elsewhere their parts, one message each. `back`: gradients, to the
    owners."""
    for shard, group in _with_others(shards, copies, leaving=not back):
        # A copy in any case: what is posted may still be on its way when its source is changed.
        parts = [part_of(copy).clone(memory_format=torch.contiguous_format) for copy in group]
        shards.post(shard, number, back, parts)


def expect_parts(shards: ShardGroup, copies: Sequence[Copy], *, back: bool = False) -> None:
    """Lets what others post for the shards here come while these compute."""
    for shard, _ in _with_others(shards, copies, leaving=back):
        shards.expect(shard)


def taken_parts(
    shards: ShardGroup, number: int, copies: Sequence[Copy], *, back: bool = False
) -> Iterator[tuple[Copy, torch.Tensor]]:
    """What others have posted for the shards here, each with the copy that it is part of."""
    for shard, group in _with_others(shards, copies, leaving=back):
        yield from zip(group, shards.take(shard, number, back), strict=True)


def _with_others(
    shards: ShardGroup, copies: Sequence[Copy], *, leaving: bool
) -> list[tuple[int, list[Copy]]]:
    """The copies that leave the shards here, or come to them, by the shard elsewhere."""
    found: dict[int, list[Copy]] = {}
    for copy in copies:
        here, there = (copy.source, copy.to) if leaving else (copy.to, copy.source)
        if here in shards.mine and there not in shards.mine:
            found.setdefault(there, []).append(copy)
    return sorted(found.items())


def _filled(job: ExchangeTask, shard: int) -> int:
    """How many positions of what a shard needs are copied; the others are outside of the image."""
    positions = 0
    for copy in job.copies:
        if copy.to == shard:
            volume = 1
            for interval in copy.put:
                volume *= interval.length
            positions += volume
    return positions


def sum_shards(
    shards: ShardGroup, groups: Sequence[tuple[int, ...]], values: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """For every shard here, the sum over its group of shards; differentiable.

    `groups[shard]` are the shards that are added up for a shard, in order.
    """
    if all(len(group) == 1 for group in groups):
        return list(values)
    result = _Sum.apply(shards, shards.next(), groups, *values)
    return [result] if isinstance(result, torch.Tensor) else list(result)


def exchanged(
    shards: ShardGroup,
    number: int,
    back: bool,
    outgoing: Mapping[int, torch.Tensor],
    incoming: Iterable[int],
) -> Iterator[tuple[int, torch.Tensor]]:
    """Sends a tensor to each of some shards elsewhere; then what comes from others, one by one."""
    # Everything is posted before anything is taken, so shards cannot wait for each other in a
    # circle.
    for shard, tensor in outgoing.items():
        shards.post(shard, number, back, [tensor])
    return ((shard, shards.take(shard, number, back)[0]) for shard in incoming)


def all_gather_shards(
    shards: ShardGroup,
    number: int,
    back: bool,
    groups: Sequence[tuple[int, ...]],
    values: Sequence[torch.Tensor],
) -> list[list[torch.Tensor]]:
    """For every shard here, the values of all shards of its group, in their order."""
    mine = shards.mine
    known = dict(zip(mine, values, strict=True))
    outgoing = {
        other: known[shard] for shard in mine for other in groups[shard] if other not in mine
    }
    known |= exchanged(shards, number, back, outgoing, sorted(outgoing))
    return [[known[other] for other in groups[shard]] for shard in mine]


def all_reduce_shards(
    shards: ShardGroup,
    number: int,
    back: bool,
    groups: Sequence[tuple[int, ...]],
    values: Sequence[torch.Tensor],
) -> list[torch.Tensor]:
    """As `sum_shards`, without autograd. Always added in the order of the shards, so that all that
    hold the same sum hold the same bits."""
    results = []
    for first, *rest in all_gather_shards(shards, number, back, groups, values):
        # A copy, because the first value may be a tensor that its owner still uses.
        result = first.clone()
        for other in rest:
            result += other
        results.append(result)
    return results


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        shards: ShardGroup,
        number: int,
        groups: Sequence[tuple[int, ...]],
        *values: torch.Tensor,
    ) -> Any:
        ctx.shards, ctx.number, ctx.groups = shards, number, groups
        results = all_reduce_shards(shards, number, False, groups, values)
        return tuple(results) if len(results) > 1 else results[0]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        # Each contribution is in the sums of all members of its group. So its gradient is the sum
        # of their gradients: the adjoint of this sum is the same sum. `back` keeps the two apart in
        # the mail, since they have one number.
        return (
            None,
            None,
            None,
            *all_reduce_shards(ctx.shards, ctx.number, True, ctx.groups, gradients),
        )
