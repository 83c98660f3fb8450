"""Values less their mean, over their deviation: both over all shards that share them.

One exchange in the forward pass (count, mean and squared deviation of every shard, put together
without cancellation), one in the backward pass (two sums). Nothing but the input is kept.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from farandole.layout.tiles.core.grid import Box
from farandole.layout.tiles.core.shard_group import ShardGroup
from farandole.layout.tiles.halo.exchange import all_gather_shards, all_reduce_shards, slices
from farandole.layout.tiles.ops.statistics import combined, widened


class NormalisationTask(NamedTuple):
    """What is normalised, and over what."""

    shards: ShardGroup
    number: int
    together: Sequence[tuple[int, ...]]  # for each shard, those that share its statistics
    dims: tuple[int, ...]  # that statistics are taken over, one after the other
    owned: Sequence[Box]  # for each shard here, from the corner of its piece
    groups: int  # of channels; 0: there are none
    group_of: Sequence[torch.Tensor]  # for each shard here, by channel of its piece
    values: int  # that a statistic is taken over, in all
    eps: float


def normalised(
    job: NormalisationTask,
    pieces: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor | None],
    biases: Sequence[torch.Tensor | None],
) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    """The pieces of the shards here, normalised, each with its weight and bias; and, of the first
    of them, mean and variance."""
    *results, mean, variance = _Normalised.apply(job, *pieces, *weights, *biases)
    return results, mean, variance


class _Normalised(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, job: NormalisationTask, *tensors: torch.Tensor | None) -> Any:
        count = len(job.shards.mine)
        pieces, weights, biases = (tensors[at : at + count] for at in range(0, 3 * count, count))
        found = _statistics(job, pieces)  # type: ignore[arg-type]
        results, kept = [], []
        for index, (mean, variance) in enumerate(found):
            piece, weight, bias = pieces[index], weights[index], biases[index]
            assert piece is not None
            inverse = (variance + job.eps).rsqrt()
            result = (widened(piece) - _spread(job, index, mean)).mul_(_spread(job, index, inverse))
            if weight is not None:
                result.mul_(weight)
            if bias is not None:
                result.add_(bias)
            results.append(result.to(piece.dtype))
            kept += [mean, inverse]
        ctx.job = job
        ctx.like_bias = [None if bias is None else (bias.shape, bias.dtype) for bias in biases]
        ctx.save_for_backward(*pieces, *weights, *kept)
        mean, variance = (each.clone() for each in found[0])
        ctx.mark_non_differentiable(mean, variance)
        return *results, mean, variance

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        job: NormalisationTask = ctx.job
        count = len(job.shards.mine)
        saved = ctx.saved_tensors  # asked for once: it may be computed again for the asking
        pieces, weights, kept = saved[:count], saved[count : 2 * count], saved[2 * count :]
        by_weight: list[torch.Tensor | None] = []
        by_bias: list[torch.Tensor | None] = []
        sums, inputs = [], []
        for index, (piece, weight) in enumerate(zip(pieces, weights, strict=True)):
            mean, inverse = (_spread(job, index, each) for each in kept[2 * index : 2 * index + 2])
            gradient = widened(gradients[index])
            by_bias.append(None)
            by_weight.append(None)
            if ctx.like_bias[index] is not None:
                shape, kind = ctx.like_bias[index]
                by_bias[-1] = gradient.sum_to_size(shape).to(kind)
            product = (widened(piece) - mean).mul_(inverse).mul_(gradient)
            if weight is not None:
                by_weight[-1] = product.sum_to_size(weight.shape).to(weight.dtype)
                product.mul_(weight)
                gradient = gradient * weight
            dims = _reduced(job)
            both = torch.stack([_added(product, dims), _added(gradient, dims)], 1)
            sums.append(_folded(job, index, both.flatten(0, 1)).unflatten(0, both.shape[:2]))
            inputs.append(gradient)
        if not ctx.needs_input_grad[1]:
            return None, *(None for _ in pieces), *by_weight, *by_bias
        results = []
        totals = all_reduce_shards(job.shards, job.number, True, job.together, sums)
        for index, (piece, total, box) in enumerate(zip(pieces, totals, job.owned, strict=True)):
            mean, inverse = (_spread(job, index, each) for each in kept[2 * index : 2 * index + 2])
            with_input, alone = (
                _spread(job, index, each) for each in (total / job.values).unbind(1)
            )
            result = inputs[index] * inverse
            own = (widened(piece) - mean).mul_(inverse).mul_(with_input).add_(alone).mul_(inverse)
            # Only owned inputs are in the statistics. The margin keeps the first term of the
            # gradient alone.
            result[slices(box)] -= own[slices(box)]
            results.append(result.to(piece.dtype))
        return None, *results, *by_weight, *by_bias


def _statistics(
    job: NormalisationTask, pieces: Sequence[torch.Tensor]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """For each shard here, mean and variance over all shards that share them."""
    local = []
    for index, (piece, box) in enumerate(zip(pieces, job.owned, strict=True)):
        own = widened(piece[slices(box)])
        dims = _reduced(job)
        count = math.prod(own.shape[at] for at in dims)
        if not dims:
            mean, deviation = own, torch.zeros_like(own)
        elif own.numel():
            variance, mean = torch.var_mean(own, dims, correction=0, keepdim=True)
            deviation = variance * count
        else:
            mean = deviation = own.sum(dims, keepdim=True)
        counts = torch.full_like(mean, count)
        if job.groups:
            kinds = job.group_of[index][box[0].slice]
            counts = _into(job.groups, kinds, counts)
            sums = _into(job.groups, kinds, mean * count)
            # A group may have channels on several shards, and none on this one: then its count is
            # zero.
            middle = sums / counts.clamp(min=1)
            apart = mean - middle.index_select(1, kinds)
            deviation = _into(job.groups, kinds, deviation + count * apart * apart)
            mean = middle
        local.append(torch.stack([counts, mean, deviation]))
    return [
        combined(known, [...] * len(known), known[0].shape[1:])
        for known in all_gather_shards(job.shards, job.number, False, job.together, local)
    ]


def _reduced(job: NormalisationTask) -> tuple[int, ...]:
    """The dimensions that are summed over before channels are put in their groups."""
    return tuple(at for at in job.dims if at > 1) if job.groups else job.dims


def _added(tensor: torch.Tensor, dims: tuple[int, ...]) -> torch.Tensor:
    return tensor.sum(dims, keepdim=True) if dims else tensor


def _into(groups: int, kinds: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Sums over the channels of each group."""
    result = values.new_zeros((values.shape[0], groups, *values.shape[2:]))
    return result.index_add_(1, kinds, values)


def _folded(job: NormalisationTask, index: int, values: torch.Tensor) -> torch.Tensor:
    return _into(job.groups, job.group_of[index], values) if job.groups else values


def _spread(job: NormalisationTask, index: int, values: torch.Tensor) -> torch.Tensor:
    """The statistics of a shard's channels, from those of their groups."""
    return values.index_select(1, job.group_of[index]) if job.groups else values
