"""BatchNorm with statistics over all tiles, or over all shards of a batch.

One exchange in the forward pass (count, mean and squared deviation of every shard, put together
without cancellation), one in the backward pass (two sums). Nothing but the input is kept.

Where a shard computes a margin that others own, its outputs there count for the gradient, but its
inputs there do not count in the statistics: they are somebody else's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from farandole.errors import UserError
from farandole.layout.tiles.core.flow import Flow
from farandole.layout.tiles.core.grid import Box, relative
from farandole.layout.tiles.core.intervals import Interval
from farandole.layout.tiles.core.shard_group import ShardGroup
from farandole.layout.tiles.core.tile import Tile
from farandole.layout.tiles.halo.exchange import all_gather_shards, all_reduce_shards, slices
from farandole.layout.tiles.ops.statistics import combined, mean_and_variance, widened


class BatchNormTask(NamedTuple):
    """What is normalised: by which shards, and what each of them has."""

    shards: ShardGroup
    number: int
    members: tuple[int, ...]  # the shards that have anything
    channels: Sequence[Interval]  # of each member
    owned: Sequence[Box | None]
    """For each shard here, from the corner of its piece; None: nothing of it counts."""
    values: int  # in a channel, in all
    eps: float
    copies: int = 1  # of every value, on as many shards


def batch_norm(
    flow: Flow,
    input: Tile,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tile:
    """`F.batch_norm`."""
    mine = flow.shards.mine
    held = [input.held(shard) for shard in mine]
    if not training:
        pieces = [
            _scaled(piece, box[0].slice, running_mean, running_var, weight, bias, eps)
            for piece, box in zip(input.pieces, held, strict=True)
        ]
        return input.like(pieces)
    task = BatchNormTask(
        flow.shards,
        flow.shards.next(),
        tuple(range(flow.grid.shards)),
        [input.owned(shard)[0] for shard in range(flow.grid.shards)],
        [relative(input.owned(shard), box) for shard, box in zip(mine, held, strict=True)],
        input.rows * math.prod(input.sizes[1:]),
        eps,
        flow.grid.shards
        // math.prod(flow.grid.parts[each] for each in input.axes if each is not None),
    )
    pieces = normalised(
        task, input.pieces, running_mean, running_var, weight, bias, momentum, input.sizes[0]
    )
    return input.like(pieces)


def normalised(
    task: BatchNormTask,
    pieces: Sequence[torch.Tensor],
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    momentum: float,
    channels: int,
) -> list[torch.Tensor]:
    """The shards' pieces, normalised; moves the running statistics."""
    if task.values == 1:
        raise UserError(
            "BatchNorm has one value for each channel, and needs at least two to learn from: take "
            "larger batches or images, or evaluate."
        )
    results: list[torch.Tensor]
    *results, mean, variance = _Normalised.apply(task, channels, weight, bias, *pieces)
    with torch.no_grad():
        if running_mean is not None:
            running_mean.mul_(1 - momentum).add_(mean.to(running_mean.dtype), alpha=momentum)
        if running_var is not None:
            unbiased = variance * (task.values / (task.values - 1))
            running_var.mul_(1 - momentum).add_(unbiased.to(running_var.dtype), alpha=momentum)
    return results


class _Normalised(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        task: BatchNormTask,
        channels: int,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        *pieces: torch.Tensor,
    ) -> Any:
        mean, variance = _statistics(task, channels, pieces)
        results = []
        for shard, piece in zip(task.shards.mine, pieces, strict=True):
            at = task.channels[task.members.index(shard)].slice
            results.append(_scaled(piece, at, mean, variance, weight, bias, task.eps))
        ctx.task = task
        ctx.bias_type = None if bias is None else bias.dtype
        ctx.save_for_backward(weight, mean, (variance + task.eps).rsqrt(), *pieces)
        ctx.mark_non_differentiable(mean, variance)
        return *results, mean, variance

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        task: BatchNormTask = ctx.task
        weight, mean, inverse, *pieces = ctx.saved_tensors
        mine = task.shards.mine
        spans = [task.channels[task.members.index(shard)] for shard in mine]
        sums = [
            _sums(gradient, piece, mean, inverse, span.slice)
            for gradient, piece, span in zip(gradients, pieces, spans, strict=False)
        ]
        by_weight = by_bias = None
        if weight is not None:
            by_weight = sum(each[0] for each in sums).to(weight.dtype)  # type: ignore[union-attr]
        if ctx.bias_type is not None:
            by_bias = sum(each[1] for each in sums).to(ctx.bias_type)  # type: ignore[union-attr]
        # All shards agree on this, because they run the same graph: all of them exchange, or none.
        if not ctx.needs_input_grad[4]:
            return None, None, by_weight, by_bias, *(None for _ in pieces)
        groups = _groups(task)
        total = all_reduce_shards(task.shards, task.number, True, groups, sums)[0] / task.values
        results = []
        for gradient, piece, span, box in zip(gradients, pieces, spans, task.owned, strict=False):
            at = span.slice
            shape = (1, -1, *(1,) * (piece.dim() - 2))
            of_mean, of_inverse = _part(mean, at), _part(inverse, at)
            scale = of_inverse if weight is None else of_inverse * _part(weight, at)
            # Shards with copies of a value each give a part of what all know.
            # The gradient of an input x is scale · (gradient − mean(gradient) − x̂ · mean(gradient
            # · x̂)), x̂ being the normalised x. With x̂ = (x − mean) · inverse this is gradient ·
            # scale − x · slope − level.
            slope = scale * of_inverse * total[0, at] / task.copies
            level = scale * total[1, at] / task.copies - of_mean * slope
            result = gradient * scale.to(gradient.dtype).reshape(shape)
            results.append(result)
            # A margin's inputs are not in the statistics, so only the first term applies to them.
            # Their outputs do count: `_sums` has taken the whole piece.
            if box is None:
                continue
            inside, own = result[slices(box)], piece[slices(box)]
            inside.addcmul_(own, slope.to(own.dtype).reshape(shape), value=-1)
            inside.sub_(level.to(own.dtype).reshape(shape))
        return None, None, by_weight, by_bias, *results


def _scaled(
    piece: torch.Tensor,
    at: slice,
    mean: torch.Tensor | None,
    variance: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
) -> torch.Tensor:
    """The channels of a piece that lie `at` these, normalised with known statistics."""
    if not piece.numel():  # torch refuses images without channels
        return piece.clone()
    mean, variance, weight, bias = (
        None if each is None else _part(each, at) for each in (mean, variance, weight, bias)
    )
    return F.batch_norm(piece, mean, variance, weight, bias, False, 0.0, eps)


def _statistics(
    task: BatchNormTask, channels: int, pieces: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and variance of all channels, over all shards."""
    local = []
    for piece, box in zip(pieces, task.owned, strict=True):
        own = widened(piece[:0] if box is None else piece[slices(box)])
        count = own.numel() // max(1, own.shape[1])
        if not count:
            local.append(own.new_zeros(3, own.shape[1]))
            continue
        mean, variance = mean_and_variance(own)
        local.append(torch.stack([torch.full_like(mean, count), mean, variance * count]))
    known = all_gather_shards(task.shards, task.number, False, _groups(task), local)[0]
    return combined(known, [span.slice for span in task.channels], (channels,))


def _sums(
    gradient: torch.Tensor,
    piece: torch.Tensor,
    mean: torch.Tensor,
    inverse: torch.Tensor,
    at: slice,
) -> torch.Tensor:
    """Of gradient × normalised input, and of the gradient: over a piece, which has the channels
    that lie `at` these. The sums are of all channels, and 0 for others."""
    if not piece.numel():
        return mean.new_zeros(2, len(mean))
    of_mean = _part(mean, at)
    _, *found = torch.ops.aten.native_batch_norm_backward(
        gradient.contiguous(),
        piece.contiguous(),
        torch.ones_like(of_mean),
        None,
        None,
        of_mean,
        _part(inverse, at),
        True,
        0.0,
        [False, True, True],
    )
    sums = torch.stack(found)
    if of_mean is mean:
        return sums
    return F.pad(sums, (at.start, len(mean) - at.stop))


def _groups(task: BatchNormTask) -> list[tuple[int, ...]]:
    return [task.members] * task.shards.grid.shards


def _part(tensor: torch.Tensor, at: slice) -> torch.Tensor:
    """The tensor itself where it is all of it."""
    return tensor if at == slice(0, len(tensor)) else tensor[at]
